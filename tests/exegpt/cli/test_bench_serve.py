"""`exegpt bench serve` on an endpoint that knows little: its requests, its outputs, what it refuses."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("httptools")
from tests.exegpt.cli.test_bad_inputs import check_refused


class Handler(BaseHTTPRequestHandler):
    """Streams `max_tokens` tokens of chat or completions at once, or all in one chunk where its server is `coarse`, and
    closes. There is no usage; [DONE] comes after the first `undone` requests.
    """

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(200, {"data": [{"id": "org/first", "max_model_len": 100}, {"id": "second"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.taken.append((self.path, self.headers, body))
        if body["max_tokens"] == 13:
            return self.answer(400, {"error": {"message": "thirteen is refused"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chunks = 1 if self.server.coarse else body["max_tokens"]
        for i in range(chunks):
            reason = "length" if i == chunks - 1 else None
            said = {"delta": {"content": "a"}} if "messages" in body else {"text": "a"}
            counted = {"usage": {"completion_tokens": body["max_tokens"]}} if self.server.coarse else {}
            chunk = {"choices": [{**said, "finish_reason": reason}], **counted}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if len(self.server.taken) > self.server.undone:
            self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, status, document):
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.coarse, server.undone = False, 10**6
    server.taken, server.url = [], f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_sweep_is_measured_and_written(exegpt, endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    out, report = tmp_path / "r.jsonl", tmp_path / "r.html"
    arguments = ("--rate", "200/s,inf", "-n", 10, "-w", "20/5", "-l", "5s", "--out", out, "--report", report)
    done = exegpt("bench", "serve", "--url", endpoint.url, *arguments, "--warm-up", 2, "--json")
    assert done.code == 0, done.err
    first, second = done.json["runs"]
    assert done.json["endpoint"] == {"url": endpoint.url, "model": "org/first", "api": "completions", "context": 100}
    assert (first["rate_seq_s"], second["rate_seq_s"]) == (200.0, None)
    for run in (first, second):
        assert (run["requests"], run["completed"], run["failed"], run["other_lengths"]) == (10, 10, 0, 0)
        assert run["within_bounds"] == 1.0 and run["statuses"] == {"200": 10}
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted((line["rate_seq_s"] or 0, line["index"]) for line in lines) == [
        (r, i) for r in (0, 200) for i in range(10)
    ]
    assert all(line["output_tokens"] == 5 and line["prompt_tokens"] == 20 and line["ok"] for line in lines)
    assert report.read_text().count("<table>") == 3
    assert len(endpoint.taken) == 22
    path, headers, body = endpoint.taken[-1]
    assert path == "/v1/completions" and headers["Authorization"] == "Bearer sesame"
    assert len(body.pop("prompt")) == 20
    assert body == {
        "model": "org/first",
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    prompts = {json.dumps(body["prompt"]) for _, _, body in endpoint.taken[:-1]}
    assert len(prompts) == 21  # every request has its own, in each run


def test_chat_gets_texts_and_prints_tables(exegpt, endpoint):
    arguments = ("--api", "chat", "--rate", "inf", "-n", 4, "-w", "20/5", "--no-ignore-eos", "--max-tokens-factor", 2)
    done = exegpt("bench", "serve", "--url", f"{endpoint.url}/v1/", "--model", "second", *arguments, "--plot")
    assert done.code == 0, done.err
    path, _, body = endpoint.taken[0]
    assert path == "/v1/chat/completions" and "ignore_eos" not in body and body["max_tokens"] == 10
    assert len(body["messages"][0]["content"].split()) == 20 and body["model"] == "second"
    assert "time to first token" in done.out and "all at once" in done.out and "tok/s" in done.out
    assert "4 outputs don't have the requested length" in done.err.replace("\n", " ")


def test_that_no_stream_has_done_is_printed_once(exegpt, endpoint):
    arguments = ("bench", "serve", "--url", endpoint.url, "--rate", "inf,inf", "-n", 4, "-w", "20/5")
    done = exegpt(*arguments)
    said = "no stream of this endpoint ends with [DONE]"
    assert done.code == 0 and (done.out + done.err).count(said) == 1
    done = exegpt(*arguments, "--json")
    assert [(run["completed"], run["without_done"]) for run in done.json["runs"]] == [(4, 4)] * 2
    assert sum(said in text for text in done.json["assumptions"]) == 1


@pytest.mark.parametrize(
    ("undone", "warm_up", "failed"), [(4, 0, [4, 0]), (2, 0, [2, 0]), (5, 1, [4, 0]), (0, 0, [0, 0])]
)
def test_streams_without_done_fail_once_another_has_it(exegpt, endpoint, tmp_path, undone, warm_up, failed):
    """The runs before are counted again, and written again."""
    endpoint.undone, out = undone, tmp_path / "r.jsonl"
    load = ("--rate", "inf,inf", "-n", 4, "-w", "20/5", "--max-concurrency", 1, "--warm-up", warm_up, "-l", "9s")
    done = exegpt("bench", "serve", "--url", endpoint.url, *load, "--out", out, "--json")
    assert done.code == 0, done.err
    assert [run["failed"] for run in done.json["runs"]] == failed
    assert [run["within_bounds"] for run in done.json["runs"]] == [1 - count / 4 for count in failed]
    errors = [json.loads(line)["error"] for line in out.read_text().splitlines()]
    assert errors.count("no_done") == sum(failed) and len(errors) == 8


def test_an_unmeasurable_time_per_token_is_printed(exegpt, endpoint):
    endpoint.coarse = True
    arguments = ("bench", "serve", "--url", endpoint.url, "--rate", "inf", "-n", 4, "-w", "20/5", "--tpot", "1ms")
    done = exegpt(*arguments)
    assert done.code == 0 and "4 answers came in one chunk" in done.out + done.err
    assert "--tpot can't be judged" in done.out + done.err and "not measurable" in done.out
    done = exegpt(*arguments, "--json")
    (run,) = done.json["runs"]
    assert run["completed"] == 4 and run["tpot"]["p50"] is run["within_bounds"] is run["goodput_seq_s"] is None
    assert "--tpot can't be judged" in done.err


def test_a_traces_arrivals_and_lengths(exegpt, endpoint, tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("input,output,arrival_s\n7,3,0.2\n8,4,0.1\n9,5,0.15\n")
    common = ("bench", "serve", "--url", endpoint.url, "--arrivals", "trace", "-w", trace, "--json")
    assert exegpt(*common).json["runs"][0]["requests"] == 3
    sizes = [(len(body["prompt"]), body["max_tokens"]) for _, _, body in endpoint.taken]
    assert sizes == [(8, 4), (9, 5), (7, 3)]
    assert exegpt(*common, "--duration", "70ms").json["runs"][0]["requests"] == 2
    check_refused(exegpt(*common, "-n", 4), "3 requests")


def test_a_duration_decides_the_number(exegpt, endpoint):
    done = exegpt(
        "bench", "serve", "--url", endpoint.url, "--rate", "40/s", "--duration", "500ms", "-w", "5/2", "--json"
    )
    assert 5 < done.json["runs"][0]["requests"] < 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rate 5", "'5' is not an arrival rate"),
        ("", "No rate is given"),
        ("--rate 5/s --num 5 --duration 5s", "--num and --duration"),
        ("--rate 5/s --duration inf", "never ends"),
        ("--rate inf --duration 5s", "pass --num"),
        ("--rate 5/s --api responses", "--api 'responses'"),
        ("--rate 5/s --api chat --prompts ids", "which takes texts"),
        ("--rate 5/s --arrivals often", "--arrivals 'often'"),
        ("--rate 5/s --burstiness 2", "--burstiness 2 needs --arrivals burst"),
        ("--arrivals trace -w 20/5", "needs a trace"),
        ("--rate 5/s --max-tokens-factor 0.5", "at least 1"),
        ("--rate 5/s --latency-bound soon", "'soon' is not a duration"),
        ("--rate 5/s --columns input=a", "leave --columns out"),
        ("--rate 5/s --tokenizer gone", r"'gone' has no tokenizer\.json"),
        ("--rate 5/s --out /nowhere/r.jsonl", "no folder '/nowhere'"),
        ("--rate 5/s -w 90/20", "90 \\+ 20 = 110 tokens exceed"),
        ("--rate 5/s --model third", "doesn't serve 'third': use one of org/first, second"),
        ("--rate 5/s -w 20/13 --warm-up 1", "thirteen is refused"),
        ("--rate 5/s --seed -1", "--seed"),
        ("--rate", "--rate"),
    ],
)
def test_bad_inputs_are_refused(exegpt, endpoint, arguments, message):
    check_refused(exegpt("bench", "serve", "--url", endpoint.url, *arguments.split()), message)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", "doesn't answer"),
        ("ftp://localhost", "not the URL"),
        ("http://", "not the URL"),
        ("http://localhost:x", "not the URL"),
        ("[", "not the URL"),
        ("http://no-such-host.invalid", "isn't known"),
    ],
)
def test_urls_that_lead_nowhere(exegpt, url, message):
    check_refused(exegpt("bench", "serve", "--url", url, "--rate", "5/s"), message)


def test_the_key_must_fit_a_header(exegpt, endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a\r\nb")
    check_refused(exegpt("bench", "serve", "--url", endpoint.url, "--rate", "5/s"), "OPENAI_API_KEY")


def test_bench_alone_still_needs_its_schedule(exegpt):
    check_refused(exegpt("bench", "--model", "m"), "--schedule.*exegpt bench --help")
    check_refused(exegpt("bench", "serve", "--rate", "5/s"), "--url.*exegpt bench serve --help")
    check_refused(exegpt("bench", "--model", "m"), "--schedule.*exegpt bench --help")
