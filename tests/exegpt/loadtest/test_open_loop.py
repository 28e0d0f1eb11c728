"""What requests get from a scripted server: exact times, exact counts, every error by its kind."""

import json

import pytest

from exegpt.loadtest.measurements import RequestBounds, measure
from exegpt.loadtest.request_outcome import REJECTED
from tests.exegpt.loadtest.fake_server import END, STREAM, FakeServer, chunk, event, load, token, tokens


def test_times_counts_and_percentiles_are_exact():
    """Ten requests a second apart; request k gets its first token after 0.1 (k + 1) s, three more each 0.05 s."""
    server = FakeServer(lambda number, _: tokens(0.1 * (number + 1), 0.05, 4))
    sent = load(server, [float(i) for i in range(10)])
    assert server.times == pytest.approx(list(range(10)), abs=1e-6)
    for k, outcome in enumerate(sent.outcomes):
        assert outcome.index == k and outcome.ok and outcome.status == 200 and outcome.finish_reason == "length"
        assert (outcome.scheduled_s, outcome.sent_s, outcome.lag_s) == pytest.approx((k, k, 0), abs=1e-6)
        assert outcome.ttft_s == pytest.approx(0.1 * (k + 1), abs=1e-6)
        assert outcome.latency_s == pytest.approx(0.1 * (k + 1) + 0.15, abs=1e-6)
        assert outcome.tpot_s == pytest.approx(0.05, abs=1e-6)
        assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 4)
    run = measure(sent, 1.0, RequestBounds(latency_s=0.9))
    assert (run.requests, run.completed, run.rejected, run.failed, run.other_lengths) == (10, 10, 0, 0, 0)
    assert run.offered_seq_s == pytest.approx(1.0)
    assert run.statuses == {"200": 10} and run.finish_reasons == {"length": 10} and run.errors == {}
    assert run.ttft == pytest.approx({"mean": 0.55, "p50": 0.55, "p90": 0.91, "p95": 0.955, "p99": 0.991}, abs=1e-6)
    assert run.latency == pytest.approx({k: v + 0.15 for k, v in run.ttft.items()}, abs=1e-6)
    assert run.tpot == pytest.approx(dict.fromkeys(run.tpot, 0.05), abs=1e-6)
    seconds = 9 + 1.0 + 0.15
    assert run.seconds == pytest.approx(seconds, abs=1e-6)
    assert run.throughput_seq_s == pytest.approx(10 / seconds) and run.throughput_tok_s == pytest.approx(40 / seconds)
    assert run.within_bounds == pytest.approx(0.7) and run.goodput_seq_s == pytest.approx(7 / seconds)


def test_arrivals_dont_wait_for_answers_and_connections_are_used_again():
    server = FakeServer(lambda number, _: tokens(1.0, 0.1, 2))
    sent = load(server, [0.0, 0.5, 0.6, 5.0, 6.5])
    assert server.times == pytest.approx([0.0, 0.5, 0.6, 5.0, 6.5], abs=1e-6)
    assert all(outcome.latency_s == pytest.approx(1.1, abs=1e-6) for outcome in sent.outcomes)
    assert sent.connections == server.connections == 3


def test_a_connection_that_the_server_closed_while_idle_is_replaced():
    server = FakeServer(lambda number, _: [*tokens(0.1, 0.1, 4), *([None] if number == 0 else [])])
    sent = load(server, [0.0, 3.0])
    assert [outcome.ok for outcome in sent.outcomes] == [True, True] and server.connections == 2


def plain(status: str, body: bytes, *headers: str) -> list:
    """A whole response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return [(0.25, "\r\n".join([*lines, "", ""]).encode() + body)]


ERROR = json.dumps({"error": {"message": "out of luck", "type": "x", "param": None, "code": None}}).encode()


SIZED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 4096\r\n\r\n"
UNSIZED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def both(*reasons: str | None) -> bytes:
    """A chunk of several choices."""
    choices = [{"index": i, "text": "a", "finish_reason": reason} for i, reason in enumerate(reasons)]
    return event({"choices": choices})


@pytest.mark.parametrize(
    ("script", "kind", "status", "message"),
    [
        (plain("500 Oops", ERROR), "http_500", 500, "out of luck"),
        (plain("400 Bad", b"<html>no</html>"), "http_400", 400, "<html>no</html>"),
        (plain("422 Bad", b'{"detail": "what is that"}'), "http_422", 422, "what is that"),
        (plain("429 Slow down", ERROR, "Retry-After: 3"), REJECTED, 429, "out of luck"),
        (plain("503 Busy", b"", "Retry-After: 3"), "http_503", 503, ""),
        (
            plain("200 OK", b'{"choices": []}', "Content-Type: application/json"),
            "not_streamed",
            200,
            "application/json",
        ),
        ([(0.0, STREAM), (0.2, token()), (0.1, token()), None], "closed", 200, "closed the connection"),
        ([(0.25, b""), None], "closed", None, "closed the connection"),
        (
            [(0.0, STREAM), (0.1, token()), (0.0, event('{"choices": [')), (0.1, END)],
            "broken_json",
            200,
            "not a JSON object",
        ),
        (
            [(0.0, STREAM), (0.1, token()), (0.1, event(json.loads(ERROR)) + event("[DONE]") + END)],
            "in_stream",
            200,
            "luck",
        ),
        (
            [(0.0, STREAM), (0.1, chunk(b'data: {"choices":\ndata: [\n\n') + token(reason="stop") + END)],
            *("broken_json", 200, '{"choices":\n['),
        ),
        (
            [(0.0, STREAM), (0.1, chunk(b"event: error\r") + chunk(b'\ndata: {"message":"died"}\r\n\r\n') + END)],
            *("in_stream", 200, "died"),
        ),
        ([(0.0, STREAM), (0.1, event("[DONE]") + END)], "empty", 200, "no token"),
        ([(0.1, b"SSH-2.0-OpenSSH\r\n")], "not_http", None, "not HTTP"),
        *(
            ([(0.0, STREAM), (0.1, token()), (0.1, token(reason=reason) + event("[DONE]") + END)], kind, 200, message)
            for reason, kind, message in (
                (None, "unfinished", "after 2 tokens without a finish reason"),
                ("", "unfinished", "without a finish reason"),
                ("abort", "finish_abort", "'abort'"),
                ("error", "finish_error", "'error'"),
                ("content_filter", "finish_content_filter", "'content_filter'"),
                (7, "finish_7", "'7'"),
            )
        ),
        ([(0.0, STREAM), (0.1, token()), (0.1, END)], "unfinished", 200, "after 1 tokens"),
        ([(0.0, STREAM), (0.1, token()), (0.1, token(reason="stop")), None], "closed", 200, "closed the connection"),
        ([(0.0, STREAM), (0.1, token(reason="stop") + event("[DONE]")), None], "closed", 200, "closed the connection"),
        ([(0.0, STREAM), (0.1, token(reason="stop") + b"40\r\ndata: [DO"), None], "closed", 200, "closed"),
        (
            [(0.0, SIZED), (0.1, b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\n'), None],
            "closed",
            200,
            "",
        ),
        ([(0.0, UNSIZED), (0.1, b'data: {"choices":[{"text":"a"}]}\n\ndata: {"cho'), None], "unfinished", 200, ""),
        ([(0.0, STREAM), (0.1, token(reason="stop")), (0.1, event({"error": "died"}) + END)], "in_stream", 200, "died"),
        ([(0.0, STREAM), (0.1, token()), (0.1, event({"error": "died"})), None], "in_stream", 200, "died"),
        (
            [
                (0.0, STREAM),
                (0.1, token(reason="stop")),
                (0.1, chunk(b'event: error\ndata: {"message":"died"}\n\n') + END),
            ],
            *("in_stream", 200, "died"),
        ),
        (
            [(0.0, STREAM), (0.1, token()), (0.1, chunk(b'error: {"code":500,"message":"died"}\n\n') + END)],
            *("in_stream", 200, "died"),
        ),
        (
            [(0.0, STREAM), (0.1, token()), (0.1, event({"object": "error", "message": "died"}) + END)],
            *("in_stream", 200, "died"),
        ),
        ([(0.0, STREAM), (0.1, both("stop", None)), (0.1, event("[DONE]") + END)], "unfinished", 200, ""),
        ([(0.0, STREAM), (0.1, both("stop", "abort")), (0.1, event("[DONE]") + END)], "finish_abort", 200, ""),
        ([(0.0, STREAM), (0.1, token()), (100.0, END)], "timeout", 200, "within 60 s"),
    ],
)
def test_what_goes_wrong_is_counted_by_kind(script, kind, status, message):
    """The request after it is answered all the same."""
    server = FakeServer(lambda number, _: script if number == 0 else tokens(0.1, 0.1, 4))
    sent = load(server, [0.0, 200.0])
    wrong, right = sent.outcomes
    assert (wrong.error, wrong.status) == (kind, status) and message in wrong.message
    assert right.ok and right.latency_s == pytest.approx(0.4, abs=1e-6)
    run = measure(sent, 1.0, RequestBounds(ttft_s=1.0))
    assert (run.rejected, run.failed) == ((1, 0) if kind == REJECTED else (0, 1))
    assert run.errors == ({} if kind == REJECTED else {kind: 1})
    assert run.completed == 1 and run.within_bounds == 0.5 and run.latency["mean"] == pytest.approx(0.4, abs=1e-6)


def test_a_server_that_is_not_there_is_an_error_of_the_request():
    sent = load(None, [0.0, 1.0])
    assert [(o.error, o.status, o.first_token_s) for o in sent.outcomes] == [("connect", None, None)] * 2
    assert sent.connections == 0 and measure(sent, 1.0, RequestBounds()).latency["p99"] is None


def test_a_server_that_says_nothing_is_given_up():
    outcome = load(FakeServer(lambda *_: [(90.0, b"")]), [0.0], timeout_s=2.0).outcomes[0]
    assert outcome.error == "timeout" and outcome.latency_s == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize(
    ("header", "waited_s"),
    [("Retry-After: 2", 2.0), ("Retry-After-Ms: 300", 0.3), ("X-Nothing: 1", 1.0), ("Retry-After: soon", 1.0)],
)
def test_an_overloaded_servers_retry_after_is_waited_for(header, waited_s):
    server = FakeServer(lambda n, _: plain("429 Slow down", ERROR, header) if n < 2 else tokens(0.5, 0.1, 4))
    waiting = load(server, [0.0], retries=2)
    outcome = waiting.outcomes[0]
    assert outcome.ok and outcome.retries == 2
    assert outcome.sent_s == pytest.approx(2 * (0.25 + waited_s), abs=1e-6)
    assert outcome.ttft_s == pytest.approx(outcome.sent_s + 0.5, abs=1e-6)  # since its arrival, the waiting included
    assert outcome.lag_s == pytest.approx(0.0, abs=1e-6)  # which is not this client's lag
    assert measure(waiting, 1.0, RequestBounds()).since_sent["latency"]["mean"] == pytest.approx(0.8, abs=1e-6)
    server.bodies.clear()
    rejected = load(server, [0.0], retries=1).outcomes[0]
    assert rejected.error == REJECTED and rejected.retries == 1


@pytest.mark.parametrize(
    ("header", "timeout_s"), [("61", 60.0), ("Wed, 21 Oct 2099 07:28:00 GMT", 60.0), ("inf", None)]
)
@pytest.mark.parametrize("retries", [0, 3])
def test_a_retry_after_beyond_the_time_limit_is_a_failure(header, timeout_s, retries):
    server = FakeServer(lambda *_: plain("429 Slow down", ERROR, f"Retry-After: {header}"))
    sent = load(server, [0.0], retries=retries, timeout_s=timeout_s)
    (outcome,) = sent.outcomes
    assert (outcome.error, outcome.status, outcome.retries) == ("retry_after", 429, 0) and "longer" in outcome.message
    assert outcome.finish_s == pytest.approx(0.25, abs=1e-6) and len(server.bodies) == 1
    run = measure(sent, 1.0, RequestBounds())
    assert (run.failed, run.rejected) == (1, 0)


NO_USAGE = [token(reason="stop" if i == 2 else None) for i in range(3)]
ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
SAID = event({"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}], "x_unknown": [1]})
CALL = event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "a"}}]}}]})
OVER = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
ENDED_BY_RETURNS = [b'{"choices":[{"text":"a"}]}\r\r', b'{"choices":[{"text":"b","finish_reason":"stop"}]}\r\r']


@pytest.mark.parametrize(
    ("script", "ttft_s", "latency_s", "count"),
    [
        ([(0.0, STREAM), *((0.1, data) for data in NO_USAGE), (0.0, END)], 0.1, 0.3, 3),  # neither usage nor [DONE]
        (
            [(0.0, STREAM), (0.1, chunk(b": keep-alive\n\n")), (0.1, token()), (0.1, token(reason="stop") + END)],
            0.2,
            0.3,
            2,
        ),
        ([(0.0, STREAM), (0.1, ROLE), (0.1, SAID), (0.1, SAID), (0.1, OVER), (0.5, END)], 0.2, 0.4, 2),
        ([(0.0, STREAM), (0.2, token("")), (0.1, token("é")), (0.1, token("", "length") + END)], 0.2, 0.4, 2),
        ([(0.0, STREAM), (0.2, token("", "stop") + END)], 0.2, 0.2, 0),
        (
            [
                (0.0, b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n"),
                (0.1, b"data:{"),
                (0.1, b'"choices":[{"text":"a","finish_reason":"stop"}]}\r\n\r\n'),
                (0.1, b"data:[DONE]\r\n\r\n"),
                None,
            ],
            *(0.2, 0.3, 1),
        ),  # no length: until the connection closes
        (
            [
                (0.0, STREAM[:40]),
                (0.1, STREAM[40:] + token()[:9]),
                (0.1, token()[9:]),
                (0.1, token(reason="stop")[:-1]),
                (0.1, b"\n" + END),
            ],
            *(0.2, 0.3, 2),
        ),  # cut anywhere
        (
            [
                (0.0, STREAM),
                (0.1, event({"error": None, "choices": [{"text": "a", "finish_reason": ""}]})),
                (0.1, token(reason="tool_calls")),
                (0.1, chunk(b"data: [DONE]") + END),
            ],
            *(0.1, 0.3, 2),
        ),  # no line's end after the last one
        (
            [
                (0.0, STREAM),
                (0.1, token()),
                (0.1, token(reason="stop") + event("[DONE]") + token()),
                (0.1, event({"error": "late"}) + END),
            ],
            *(0.1, 0.2, 2),
        ),  # what comes after [DONE] is not read
        ([(0.0, STREAM), (0.1, token()), (0.1, token(reason="stop") + event("[DONE]")), (90.0, END)], 0.1, 0.2, 2),
        (
            [
                (0.0, STREAM),
                (0.1, ROLE),
                *[(0.1, CALL)] * 3,
                (0.1, event({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}) + END),
            ],
            *(0.2, 0.5, 3),
        ),
        (
            [(0.0, STREAM), *((0.1, chunk(b"data: " + part)) for part in ENDED_BY_RETURNS), (0.0, END)],
            *(0.1, 0.2, 2),
        ),
        (
            [
                (0.0, STREAM.replace(b"text/event-stream", b"Text/Event-Stream")),
                (0.1, chunk(b'\xef\xbb\xbfdata: {"choices":\ndata: [{"text": "a"}]}\n\n')),
                (0.1, chunk(b"data:\n\ndata: null\n\n") + token(reason="eos_token") + END),
            ],
            *(0.1, 0.2, 2),
        ),  # a byte order mark, data of two lines, and events that say nothing
    ],
)
def test_what_other_servers_leave_out_is_no_error(script, ttft_s, latency_s, count):
    outcome = load(FakeServer(lambda *_: script), [0.0]).outcomes[0]
    assert outcome.error is None, outcome.message
    assert outcome.ttft_s == pytest.approx(ttft_s, abs=1e-6)
    assert outcome.latency_s == pytest.approx(latency_s, abs=1e-6)
    assert outcome.output_tokens == count and outcome.prompt_tokens == 3  # as drawn, where no usage says


def test_requests_beyond_the_concurrency_wait_in_the_client():
    sent = load(FakeServer(lambda *_: tokens(0.7, 0.1, 4)), [0.0, 0.0, 0.5, 9.0], max_concurrency=1)
    assert [o.latency_s for o in sent.outcomes] == pytest.approx([1.0, 2.0, 2.5, 1.0], abs=1e-6)
    assert [o.sent_s for o in sent.outcomes] == pytest.approx([0.0, 1.0, 2.0, 9.0], abs=1e-6)
    run = measure(sent, 1.0, RequestBounds())
    assert run.client.send_lag["p99"] == pytest.approx(0.0, abs=1e-6) and sent.connections == 1
    assert run.since_sent["latency"]["p99"] == pytest.approx(1.0, abs=1e-6)


def test_a_client_leaves_at_the_drawn_length():
    server = FakeServer(lambda *_: tokens(0.5, 0.1, 40))
    sent = load(server, [0.0, 10.0], cut_at=4)
    for outcome in sent.outcomes:
        assert outcome.ok and outcome.output_tokens == 4 and outcome.finish_reason == "cut"
        assert outcome.latency_s == pytest.approx(0.8, abs=1e-6)
    assert server.left == 2 and sent.connections == 2


def test_outputs_of_another_length_are_counted():
    sent = load(FakeServer(lambda number, _: tokens(0.1, 0.1, 4 - number)), [0.0, 5.0, 10.0])
    run = measure(sent, None, RequestBounds())
    assert run.other_lengths == 2 and run.rate_seq_s is None and run.goodput_seq_s is None


def test_an_answer_in_one_chunk_has_no_time_per_token():
    usage = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 8}})
    for end in (token("", "length"), b""):
        script = [
            (0.0, STREAM),
            (0.1, token("aaaa", None if end else "length")),
            (0.1, end + usage + event("[DONE]") + END),
        ]
        (outcome,) = load(FakeServer(lambda *_, script=script: script), [0.0]).outcomes
        assert outcome.ok and outcome.output_tokens == 8 and outcome.chunks == 1 and outcome.tpot_s is None
        assert outcome.in_one_chunk and outcome.document(1.0)["tpot_s"] is None


def test_a_usage_that_comes_late_is_no_time_per_token():
    """The last token came at 0.3 s, the usage a second later: an output token took 0.1 s."""
    usage = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}})
    script = [(0.0, STREAM), *((0.1, data) for data in NO_USAGE), (1.0, usage + event("[DONE]") + END)]
    (outcome,) = load(FakeServer(lambda *_: script), [0.0]).outcomes
    assert outcome.ok and outcome.latency_s == pytest.approx(1.3, abs=1e-6)
    assert outcome.tpot_s == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("counted", [-3, 0, True, "8", 2.5, 10**30, None])
def test_a_usage_that_is_no_count_is_not_believed(counted):
    usage = event({"choices": [], "usage": {"prompt_tokens": counted, "completion_tokens": counted}})
    script = [(0.0, STREAM), *((0.1, data) for data in NO_USAGE), (0.0, usage + event("[DONE]") + END)]
    (outcome,) = load(FakeServer(lambda *_: script), [0.0]).outcomes
    assert outcome.ok and outcome.output_tokens == outcome.prompt_tokens == 3
