"""Grammars are compiled beside what runs: nobody waits for another's, and aborts and the end find them."""

import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from tests.xrunner import cells
from tests.xrunner.core.test_grammar import text_of
from xcore.requests.engine_protocol import BEGIN, DRAIN, FROM_ENGINE, Abort, Frames, Stepped, Stop, framed
from xcore.requests.grammar import Grammars
from xcore.requests.request import Request
from xrunner.core import inbox
from xrunner.core.compiling import Compiling
from xrunner.core.driver import Options
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.rank.warm_up import Extent

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install -e '.[serve]'")
COMPACT = {"whitespace_flexible": False}
BOOLEANS = json.dumps(
    {"x-guidance": COMPACT, "type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
)


class Frontend:
    """The other end of an inbox, which a thread serves."""

    def __init__(self, engine):
        ours, theirs = socket.socketpair()
        ours.settimeout(20)
        self._socket, self._frames = ours, Frames(FROM_ENGINE)
        self.tokens, self.ended = {}, {}
        opened = "opened"  # the frontend of this test knows
        self._thread = threading.Thread(target=inbox.serve, args=(engine, inbox.Inbox(theirs), opened), daemon=True)
        self._thread.start()
        self.send(BEGIN)

    def send(self, *messages):
        for message in messages:
            self._socket.sendall(framed(message))

    def read_until(self, condition):
        while not condition():
            for message in self._frames.feed(self._socket.recv(2**16)):
                if isinstance(message, Stepped):
                    for event in message.tokens.events():
                        self.tokens.setdefault(event.request_id, []).append(event.token)
                    self.ended |= {ended.id: ended for ended in message.ended}

    def drain(self):
        self.send(DRAIN)
        self.join()

    def join(self):
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def engine(directories):
    model = load_model(directories["llama"])
    plan = cells.schedule(model.spec, "orca", kv_blocks=100)
    engine = Engine(model, plan, tokenizer=directories["llama"] / "tokenizer.json")
    engine.open(Extent.within(plan, 60, 60), Options())
    yield engine
    engine.close()


@pytest.fixture
def held(monkeypatch):
    """Compiling lasts until this is set; `started` is set when it begins."""
    gate = SimpleNamespace(open=threading.Event(), started=threading.Event())
    compiled = Grammars._compile

    def compile_later(self, grammar):
        gate.started.set()
        assert gate.open.wait(20)
        return compiled(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", compile_later)
    yield gate
    gate.open.set()


def plain(name, tokens):
    return Request(name, (5, 6, 7), tokens, True)


def test_others_get_their_tokens_while_a_grammar_is_compiled(engine, held, directories):
    frontend = Frontend(engine)
    frontend.send(plain("0", 50), Request("1", (1, 2), 40, grammar=BOOLEANS))
    assert held.started.wait(20)
    frontend.send(plain("2", 3))
    frontend.read_until(lambda: {"0", "2"} <= set(frontend.ended))
    assert len(frontend.tokens["0"]) == 50 and len(frontend.tokens["2"]) == 3 and "1" not in frontend.tokens
    held.open.set()
    frontend.read_until(lambda: "1" in frontend.ended)
    answer = json.loads(text_of(directories["llama"] / "tokenizer.json", frontend.tokens["1"]))
    assert 2 <= len(answer) <= 3 and {type(item) for item in answer} == {bool}
    frontend.drain()


def test_a_known_grammar_waits_for_no_thread(engine, held, monkeypatch):
    held.open.set()
    engine.grammars.compile(BOOLEANS)
    monkeypatch.setattr(Grammars, "compile", None)
    frontend = Frontend(engine)
    frontend.send(Request("1", (1, 2), 40, grammar=BOOLEANS))
    frontend.read_until(lambda: "1" in frontend.ended)
    assert frontend.ended["1"].reason == "stop"
    frontend.drain()


def test_a_request_that_is_aborted_meanwhile_makes_no_token(engine, held):
    frontend = Frontend(engine)
    frontend.send(Request("1", (1, 2), 40, grammar=BOOLEANS))
    assert held.started.wait(20)
    frontend.send(Abort(("1",)), plain("2", 3))
    frontend.read_until(lambda: "2" in frontend.ended)
    held.open.set()
    frontend.read_until(lambda: "1" in frontend.ended)
    assert frontend.ended["1"].reason == "cancelled" and "1" not in frontend.tokens
    frontend.drain()


def test_a_request_that_a_stop_text_ends_meanwhile_makes_no_token(engine, held):
    """Its tokens are of the engine before this one: the frontend may read them late."""
    frontend = Frontend(engine)
    frontend.send(Request("1", (1, 2), 40, grammar=BOOLEANS, output_ids=(58,)))
    assert held.started.wait(20)
    frontend.send(Stop("1", 1), plain("2", 3))
    frontend.read_until(lambda: "2" in frontend.ended)
    held.open.set()
    frontend.read_until(lambda: "1" in frontend.ended)
    assert frontend.ended["1"].reason == "cancelled" and "1" not in frontend.tokens
    frontend.drain()


def test_a_drain_waits_for_what_is_compiled(engine, held):
    frontend = Frontend(engine)
    frontend.send(Request("1", (1, 2), 40, grammar=BOOLEANS), DRAIN)
    assert held.started.wait(20)
    held.open.set()
    frontend.read_until(lambda: "1" in frontend.ended)
    assert frontend.ended["1"].reason == "stop" and frontend.tokens["1"]
    frontend.join()  # it has drained


def test_a_refused_grammar_says_why(engine):
    frontend = Frontend(engine)
    frontend.send(Request("1", (1, 2), 40, grammar="start: bad("), plain("2", 3))
    frontend.read_until(lambda: len(frontend.ended) == 2)
    assert frontend.ended["1"].reason == "error" and "llguidance refuses it" in frontend.ended["1"].refused
    frontend.drain()


def test_items_come_back_once_in_order_and_aborted_ones_are_marked(held, directories):
    compiling = Compiling(Grammars(directories["llama"] / "tokenizer.json", frozenset({256}), 300))
    asked = [Request(str(i), (1,), 4, grammar=f"start: /{'a' * (i + 1)}/") for i in range(3)]
    assert [compiling.put(number, request) for number, request in enumerate(asked)] == [True] * 3
    assert not compiling.put(9, plain("9", 3)) and compiling and compiling.take() == []
    compiling.abort("1")
    compiling.abort("another")
    held.open.set()
    taken, until = [], time.monotonic() + 20
    while compiling:
        taken += compiling.take()
        assert time.monotonic() < until
    assert taken == [(0, False), (1, True), (2, False)]
    assert not compiling.put(0, asked[0])  # known now
