"""The programs in examples/ run, and print what their readers look for."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments):
    """Run an example; return its standard output and standard error."""
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_ways_to_share_two_gpus_are_compared():
    out, _ = run("plan_from_python.py")
    assert "muxserve: sustains all rates" in out and "seallm: sustains all rates" in out
    assert out.count("chat: devices") == out.count("code: devices") == 2


def test_waiting_falls_with_the_limit_of_sequences(tmp_path):
    """The trace has 200 requests that arrive at once."""
    trace = tmp_path / "trace.jsonl"
    row = json.dumps({"arrived_at": 0.0, "input_tokens": 512, "output_tokens": 128})
    trace.write_text("\n".join([row] * 200))
    out, _ = run("replay_a_trace.py", trace)
    waits = [float(line.split("within ")[1].split(" s")[0]) for line in out.splitlines()]
    assert len(waits) == 3 and waits == sorted(waits, reverse=True) and waits[0] > 2 * waits[2]


class _Busy(BaseHTTPRequestHandler):
    """A server that has room at the third try."""

    tries = 0

    def do_GET(self):
        self.answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _Busy.tries += 1
        if _Busy.tries < 3:
            self.answer(429, {"error": {"message": "too busy"}}, retry_after="0")
        else:
            self.answer(200, {"choices": [{"text": f"{body['prompt']} there was"}]})

    def answer(self, status, document, retry_after=None):
        data = json.dumps(document).encode()
        self.send_response(status)
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        """Print nothing."""


@pytest.fixture
def busy_server():
    _Busy.tries = 0
    server = HTTPServer(("127.0.0.1", 0), _Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["replay_a_trace.py", "nothing.jsonl"], "There is no trace file 'nothing.jsonl'."),
        (["patient_client.py"], "Give the server's address and a prompt"),
        (["patient_client.py", "http://127.0.0.1:1", "Once"], "http://127.0.0.1:1 gave no completion"),
        (["patient_client.py", "nowhere", "Once"], "nowhere gave no completion"),
    ],
)
def test_bad_inputs_get_a_sentence(words, sentence):
    command = [sys.executable, EXAMPLES / words[0], *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=EXAMPLES.parent)
    assert done.returncode == 1 and done.stderr.startswith(sentence) and "Traceback" not in done.stderr


def test_a_client_comes_back_when_the_server_says_so(busy_server):
    out, errors = run("patient_client.py", busy_server, "Once")
    assert out == "Once there was\n" and errors.count("trying again") == 2 and _Busy.tries == 3
