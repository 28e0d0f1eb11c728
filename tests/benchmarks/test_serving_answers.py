"""Benchmarks of servers take no cut answer for an answer."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from benchmarks.replacement import answer, longest_gap
from benchmarks.serving_overhead import ask
from benchmarks.serving_peers import read_run

TOKEN, END = b'data: {"choices":[{"finish_reason":null}]}\n\n', b'data: {"choices":[{"finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@contextmanager
def answering(body):
    """The URL of a server that answers every request with `body`, until it closes the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_request_of_the_vllm_client_with_too_few_tokens_failed():
    result = {"ttfts": [0.1, 0.2, 0.0, 0.3], "itls": [[0.5], [0.5], [], [0.5]], "errors": ["", "", "", "closed"]}
    run = read_run(result | {"output_lens": [4, 3, 0, 4], "duration": 9.0}, 2.0, [4, 4, 4, 4])
    assert run.latencies_s == (0.6,) and run.failed == 3


@pytest.mark.parametrize("cut", [TOKEN, TOKEN + END, TOKEN + DONE, TOKEN + b'data: {"error":{}}\n\n' + DONE])
def test_a_cut_stream_ends_the_measurement(cut):
    with answering(cut) as url:
        with pytest.raises(SystemExit, match="cut an answer"):
            ask(url, [1], 2, True)
        with pytest.raises(ValueError, match="cut a stream"):
            longest_gap(url, "m", 0, threading.Event())


def test_whole_answers_are_read():
    with answering(TOKEN + END + DONE) as url:
        ask(url, [1], 2, True)
    with answering(b'{"choices":[{"token_ids":[5],"finish_reason":"length"}]}') as url:
        ask(url, [1], 1, False)
        assert answer(url, "m", 0) == [5]
    with answering(b'{"choices":[{"token_ids":[5],"finish_reason":"abort"}]}') as url:
        with pytest.raises(SystemExit, match="cut an answer"):
            ask(url, [1], 1, False)
        with pytest.raises(ValueError, match="'abort'"):
            answer(url, "m", 0)
