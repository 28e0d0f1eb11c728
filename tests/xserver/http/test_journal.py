"""Requests with an Idempotency-Key: answered once, though clients and the frontend go away."""

import asyncio
import json
import signal
import socket
import stat
import threading
import time
from types import SimpleNamespace

import pytest

from tests.xserver.conftest import serving
from tests.xserver.engines.test_server_unit import frontends
from tests.xserver.test_faults import LONG, ask, prompts
from xcore.requests.engine_protocol import Ended
from xcore.requests.request import Request
from xserver.engines.engine_link import EngineLink, Output
from xserver.http.answering import answer
from xserver.http.api import make_answer
from xserver.http.api_error import ApiError, unavailable
from xserver.http.frontends import Frontends
from xserver.http.journal import Journal
from xserver.telemetry.monitor import Arrival


@pytest.fixture
def kept(server):
    return server, server.log.parent / "journal"


def asked(server, key, **options):
    body = {"prompt": [3, 4, 5], "max_tokens": 60, "ignore_eos": True, "return_token_ids": True} | options
    status, _, data = server.post("/v1/completions", body, Idempotency_Key=key)
    return status, json.loads(data)


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def test_a_key_is_answered_once(kept):
    server, journal = kept
    first, second = asked(server, "once"), asked(server, "once")
    assert first[0] == second[0] == 200
    assert tokens(first[1]) == tokens(second[1])  # sampled, without a seed of the client's
    assert tokens(asked(server, "another")[1]) != tokens(first[1])
    (path,) = [p for p in journal.glob("*.json") if json.loads(p.read_text())["tokens"] == [tokens(first[1])]]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(journal.stat().st_mode) == 0o700


def test_a_repeated_answer_keeps_its_id_and_time(kept):
    server, _ = kept
    first = asked(server, "named")[1]
    streamed = {"prompt": [5], "stream": True}
    streams = [server.post("/v1/completions", streamed, Idempotency_Key="streamed")[2]]
    time.sleep(1.0)  # another second
    again = asked(server, "named")[1]
    assert (again["id"], again["created"]) == (first["id"], first["created"])
    streams.append(server.post("/v1/completions", streamed, Idempotency_Key="streamed")[2])
    chunks = [
        [json.loads(line[6:]) for line in s.decode().split("\n\n") if line.startswith("data: {")] for s in streams
    ]
    assert len({(chunk["id"], chunk["created"]) for of_one in chunks for chunk in of_one}) == 1
    assert asked(server, "other")[1]["id"] != first["id"]


def test_a_key_goes_with_a_response(kept):
    server, _ = kept
    answers = [
        server.post("/v1/responses", {"input": "a", "max_output_tokens": 5}, Idempotency_Key="r") for _ in range(2)
    ]
    assert [status for status, _, _ in answers] == [200, 200]
    assert json.loads(answers[0][2])["id"] == json.loads(answers[1][2])["id"]


def test_the_key_of_a_body_that_is_no_conversation_is_free_again(kept):
    server, _ = kept
    wrong = {"input": [{"role": "user"}], "max_output_tokens": 5}
    assert server.post("/v1/responses", wrong, Idempotency_Key="corrected")[0] == 400
    assert server.post("/v1/responses", wrong | {"input": "a"}, Idempotency_Key="corrected")[0] == 200


def test_the_id_and_time_of_an_answer_outlive_the_process(tmp_path):
    """An earlier version's entries have neither: they get ones that stay."""

    async def keep():
        journal = Journal(tmp_path, 60.0)
        await journal.keep(journal.entry("", "a", "/v1/completions", {"prompt": "x"}, lambda: 7, "first"))

    asyncio.run(keep())
    (path,), (entry,) = tmp_path.glob("*.json"), Journal(tmp_path, 60.0).unfinished
    assert entry.answer_id == "first" and abs(entry.created - time.time()) < 60
    written = json.loads(path.read_text())
    assert written["answer_id"] == "first" and written["created"] == entry.created
    path.write_text(json.dumps({key: value for key, value in written.items() if key not in ("answer_id", "created")}))
    one, other = (Journal(tmp_path, 60.0).unfinished[0] for _ in range(2))
    assert one.answer_id == other.answer_id and one.created == other.created > 0


def test_requests_of_one_key_at_once_are_one(kept):
    server, _ = kept
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(asked(server, "together"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for status, _ in answers} == {200} and len({tuple(tokens(a)) for _, a in answers}) == 1


def test_a_key_with_another_body_is_refused(kept):
    server, _ = kept
    assert asked(server, "reused")[0] == 200
    status, answer = asked(server, "reused", max_tokens=5)
    assert status == 422 and answer["error"]["code"] == "idempotency_key_reused"
    assert asked(server, "x" * 300)[0] == 400


def test_a_client_that_leaves_does_not_cancel(kept):
    server, journal = kept
    body = json.dumps(LONG | {"prompt": [9, 8, 7], "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + b"Idempotency-Key: left\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        client.recv(100)
    until = time.monotonic() + 20
    want = ask(server, [9, 8, 7])[1]["choices"][0]["token_ids"]
    while time.monotonic() < until and not any(
        json.loads(path.read_text())["tokens"] == [want] for path in journal.glob("*.json")
    ):
        time.sleep(0.1)
    status, _, data = server.post("/v1/completions", json.loads(body), Idempotency_Key="left")
    chunks = [line for line in data.decode().split("\n\n") if line.startswith("data: {")]
    assert status == 200
    assert [t for chunk in chunks for t in json.loads(chunk[6:])["choices"][0]["token_ids"]] == want


def test_a_full_disk_refuses_new_requests_alone(tmp_path, monkeypatch):

    journal = Journal(tmp_path / "journal", 60.0)

    async def run():
        accepted = journal.entry("", "a", "/v1/completions", {"prompt": "x"}, lambda: 7, "id")
        await journal.keep(accepted)
        monkeypatch.setattr("os.fsync", _full)
        refused = journal.entry("", "b", "/v1/completions", {"prompt": "x"}, lambda: 7, "id")
        with pytest.raises(ApiError) as error:
            await journal.keep(refused)
        assert error.value.status == 503 and "No space left".lower() in error.value.message.lower()
        accepted.outputs = []
        await journal.finish(accepted)  # answered all the same
        assert accepted.ended_s is not None

    asyncio.run(run())
    assert Journal(tmp_path / "journal", 60.0).unfinished[0].body == {"prompt": "x", "seed": 7}


def test_old_and_torn_entries_are_deleted(tmp_path):

    journal = Journal(tmp_path, 60.0)
    entry = journal.entry("", "a", "/v1/completions", {"prompt": "x"}, lambda: 7, "id")
    entry.outputs = []
    asyncio.run(journal.finish(entry))
    (tmp_path / "torn.json").write_text('{"path": "/v1/')
    assert len(Journal(tmp_path, 60.0).entries) == 1 and not (tmp_path / "torn.json").exists()
    assert not Journal(tmp_path, -1.0).entries and not list(tmp_path.glob("*.json"))


def test_an_answer_is_kept_with_its_log_probabilities(tmp_path):
    journal = Journal(tmp_path, 60.0)
    entry = journal.entry("", "a", "/v1/completions", {"prompt": "x"}, lambda: 7, "id")
    request = Request("0", (5, 6), 2, logprobs=1, prompt_logprobs=True)
    made = Output(
        request, tokens=[8], logprobs=[(-1.5, ((8, -1.5),))], prompt_logprobs=[(None, ()), (-2.0, ((9, -0.5),))]
    )
    entry.outputs = [made]
    asyncio.run(journal.finish(entry))
    ((kept,),) = (entry.outputs for entry in Journal(tmp_path, 60.0).entries.values())
    assert kept.tokens == [8] and kept.ended.reason == "stop"
    for rows, known in ((kept.logprobs, made.logprobs), (kept.prompt_logprobs, made.prompt_logprobs)):
        assert [(own, [tuple(pair) for pair in pairs]) for own, pairs in rows] == [(o, list(p)) for o, p in known]


def _full(_):
    raise OSError(28, "No space left on device")


def test_a_request_that_cannot_be_prepared_takes_no_place(kept):
    server, _ = kept
    status, answer = asked(server, "too long", prompt=[1] * 200)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert asked(server, "too long")[0] == 200  # else another body of the key would be refused with 422


def test_answers_of_another_process_are_deleted_in_time(tmp_path):
    async def left():
        journal = Journal(tmp_path, 0.05)
        entry = journal.entry("", "a", "/v1/completions", {"prompt": "x"}, lambda: 7, "id")
        entry.outputs = []
        await journal.finish(entry)
        journal.begin()
        before = len(list(tmp_path.glob("*.json")))
        await asyncio.sleep(0.2)
        return before, len(list(tmp_path.glob("*.json"))), len(journal.entries)

    assert asyncio.run(left()) == (1, 0, 0)


BODY = {"prompt": [5, 6], "max_tokens": 4, "stream": True}
PATH = "/v1/completions"


class Refusing:
    """Admission that refuses the first few requests."""

    def __init__(self, refused):
        self.refused = refused

    def refuse_early(self, extent, arrived_s, tokenizing):
        pass

    def admit(self, prompts, arrived_s, cached=()):
        self.refused -= 1
        if self.refused >= 0:
            raise unavailable("Later.", "later", 1)

    def ended(self, output):
        pass


def _post(frontend, body=BODY):
    """What a request with a key comes to, as far as to the stream of its answer: the number of its sequence."""
    return _answered(frontend, frontend.journal.entry("", "a", PATH, body, lambda: 7, "id"))


async def _answered(frontend, entry):
    http = SimpleNamespace(state=SimpleNamespace(arrival=Arrival(0.0, {})))
    await answer(http, lambda: make_answer(PATH, entry.body, frontend, "id"), frontend, entry)
    entry.reading.cancel()
    return entry.outputs[0].request.id


def _journalling(model, directory, admission):
    (frontend,) = frontends(model, EngineLink(), journal=Journal(directory, 60.0))
    frontend.admission = admission
    return frontend


@pytest.mark.parametrize("admission", [None, Refusing(1)], ids=["the engine loads", "too many wait"])
def test_a_client_that_asks_too_early_does_not_delete_what_was_accepted(model, tmp_path, admission):
    """By the server before, say."""

    async def accept():
        journal = Journal(tmp_path, 60.0)
        await journal.keep(journal.entry("", "a", PATH, BODY, lambda: 7, "id"))

    async def ask():
        frontend = _journalling(model, tmp_path, admission)
        with pytest.raises(ApiError) as refused:
            await _post(frontend)
        assert refused.value.status == 503
        return frontend.journal.unfinished

    asyncio.run(accept())
    assert len(asyncio.run(ask())) == 1 and len(Journal(tmp_path, 60.0).unfinished) == 1


def test_an_engine_that_opens_runs_no_request_that_was_not_accepted(model, tmp_path):
    """One that is being prepared as the engine is started again is admitted, or refused, like any other."""

    async def ask():
        frontend = _journalling(model, tmp_path, Refusing(1))
        asking = asyncio.ensure_future(_post(frontend))
        await asyncio.sleep(0)
        assert len(frontend.journal.entries) == 1
        left = frontend.journal.unfinished
        with pytest.raises(ApiError):
            await asking
        return left, len(frontend.journal.entries)

    assert asyncio.run(ask()) == ([], 0)


def test_one_that_is_refused_leaves_the_key_to_those_that_ask_at_the_same_time(model, tmp_path):
    """One of two is refused; others that come in that moment join the other one."""

    async def ask():
        others = []

        def come():
            others.append(asyncio.ensure_future(_post(frontend)))
            with pytest.raises(ApiError, match="another body"):
                _post(frontend, BODY | {"n": 2})

        class Admission(Refusing):
            def refuse_early(self, extent, arrived_s, tokenizing):
                pass

            def admit(self, prompts, arrived_s, cached=()):
                if self.refused == 1:
                    asyncio.get_running_loop().call_soon(come)
                super().admit(prompts, arrived_s)

        frontend = _journalling(model, tmp_path, Admission(1))
        first, second = (asyncio.ensure_future(_post(frontend)) for _ in range(2))
        ended = await asyncio.gather(first, second, return_exceptions=True)
        return *sorted(error.code if isinstance(error, ApiError) else error for error in ended), await others[0]

    assert asyncio.run(ask()) == ("0", "later", "0"), "one sequence"


def test_a_request_that_fails_by_a_fault_leaves_its_key(model, tmp_path, monkeypatch):
    async def ask():
        frontend = _journalling(model, tmp_path, Refusing(0))
        with monkeypatch.context() as patch:
            patch.setattr("xserver.http.completions.CompletionAnswer.prepare", None)
            with pytest.raises(TypeError):
                await _post(frontend)
        return await _post(frontend, body=BODY | {"max_tokens": 3})

    assert asyncio.run(ask()) == "0"


@pytest.mark.parametrize("gives_up", [False, True], ids=["one sequence fails", "the engine fails for good"])
def test_one_that_fails_is_forgotten_unless_the_next_server_can_run_it(model, tmp_path, gives_up):
    """A grammar may become too complex in the midst of an output. The same key had had the same error for ever, and its
    file was run again by each server that came.
    """

    async def ask():
        frontend = _journalling(model, tmp_path, Refusing(0))
        entry = frontend.journal.entry("", "a", PATH, BODY | {"n": 2}, lambda: 7, "id")
        http = SimpleNamespace(state=SimpleNamespace(arrival=Arrival(0.0, {})))
        await answer(http, lambda: make_answer(PATH, entry.body, frontend, "id"), frontend, entry)
        if gives_up:
            frontend.link.fail()
        else:
            ended = frontend.link.outputs.pop("1")
            ended.ended = Ended("1", "error")
            ended.announce()
        await entry.reading
        return len(frontend.link.outputs), len(frontend.journal.unfinished)

    assert asyncio.run(ask()) == (0, gives_up)
    assert len(list(tmp_path.glob("*.json"))) == gives_up


def test_one_that_is_being_written_counts_when_others_are_admitted(model, tmp_path):
    """A disk takes milliseconds: all that came meanwhile were accepted by an engine that seemed idle."""
    running = []

    class Counting(Refusing):
        def refuse_early(self, extent, arrived_s, tokenizing):
            pass

        def admit(self, prompts, arrived_s, cached=()):
            running.append(len(frontend.link.outputs))

    async def ask(key):
        return await _answered(frontend, frontend.journal.entry("", key, PATH, BODY, lambda: 7, "id"))

    async def ask_all():
        await asyncio.gather(*(ask(str(number)) for number in range(8)))

    frontend = _journalling(model, tmp_path, Counting(0))
    asyncio.run(ask_all())
    assert running == list(range(8))


def test_a_request_whose_handler_is_cancelled_as_it_is_written_leaves_no_file(model, tmp_path, monkeypatch):
    """Its thread goes on: the next server would run what nobody was promised."""
    writing, go_on = threading.Event(), threading.Event()
    write = Journal._write

    def slowly(journal, entry):
        writing.set()
        go_on.wait(5.0)
        write(journal, entry)

    async def ask():
        frontend = _journalling(model, tmp_path, Refusing(0))
        monkeypatch.setattr(Journal, "_write", slowly)
        asking = asyncio.ensure_future(_post(frontend))
        await asyncio.to_thread(writing.wait, 5.0)
        asking.cancel()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        await asyncio.wait({asking})
        return asking.cancelled(), frontend.journal.entries

    assert asyncio.run(ask()) == (True, {})
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_is_refused_leaves_no_file(model, tmp_path):
    async def ask():
        frontend = _journalling(model, tmp_path, Refusing(1))
        with pytest.raises(ApiError, match="Later"):
            await _post(frontend)
        return frontend.journal.entries

    assert asyncio.run(ask()) == {} and list(tmp_path.iterdir()) == []


def test_what_a_killed_process_had_written_by_half_is_deleted(tmp_path):
    (tmp_path / "half.partial").write_text('{"path": "/v1/')
    assert not Journal(tmp_path, 60.0).entries and list(tmp_path.iterdir()) == []


def test_requests_to_models_that_are_served_no_longer_are_deleted_in_time(model, tmp_path, capsys):
    """Until then another server may be started on the folder, which has their models."""
    for name in ("a", "b", "gone", None):
        body = {"prompt": "a"} | ({"model": name} if name else {})
        entry = {"path": PATH, "asked": "", "body": body, "ended_s": None}
        (tmp_path / f"{name}.json").write_text(json.dumps(entry))

    async def serve(*links):
        journal = Journal(tmp_path, 0.1)
        served = Frontends(frontends(model, *links, journal=journal))
        journal.begin(served.unserved(journal.unfinished))
        before = len(journal.unfinished)
        await asyncio.sleep(0.3)
        return before, sorted(entry.name for entry in journal.unfinished)

    assert asyncio.run(serve(EngineLink())) == (4, ["None", "a", "b", "gone"]), "the name may have changed"
    assert asyncio.run(serve(EngineLink(), EngineLink())) == (4, ["a", "b"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]
    assert "2 journalled requests need models that this server lacks" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("key", [None, "a"], ids=["no key", "three of one key"])
@pytest.mark.parametrize("ends", ["length", "stop text", "error"])
def test_admission_learns_from_each_answer_once(model, tmp_path, key, ends):
    """However many join it, and though the engine was told to end it at a stop text; not from one that failed."""
    learned = []

    class Learning(Refusing):
        def ended(self, output):
            learned.append(output.request.id)

    async def ask():
        frontend = _journalling(model, tmp_path, Learning(0))
        (letter,) = frontend.model.encode("a", special=False)
        body = {"prompt": [5, 6], "max_tokens": 4, "stop": "aa", "seed": 1}

        def answered():
            entry = frontend.journal.entry("", key, PATH, body, lambda: 7, "id") if key else None
            gone = asyncio.Event().wait
            http = SimpleNamespace(state=SimpleNamespace(arrival=Arrival(0.0, {})), receive=gone)
            return answer(http, lambda: make_answer(PATH, body, frontend, "id"), frontend, entry)

        asking = [asyncio.ensure_future(answered()) for _ in range(3 if key else 1)]
        while frontend.active < len(asking) + bool(key):
            await asyncio.sleep(0.01)
        output = frontend.link.outputs["0"]
        output.tokens += [letter, letter] if ends == "stop text" else [letter]
        output.ended = None if ends == "stop text" else Ended("0", ends)
        output.announce()
        done = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(one, ApiError) == (ends == "error") for one in done)
        while frontend.active:
            await asyncio.sleep(0.01)

    asyncio.run(ask())
    assert learned == ([] if ends == "error" else ["0"])


def test_a_killed_frontend_answers_after_its_restart(model, schedule, tmp_path):
    journal, answers = tmp_path / "journal", []
    body = {"max_tokens": 110, "ignore_eos": True, "return_token_ids": True}

    def ask_in_vain(number):
        try:
            server.post("/v1/completions", body | {"prompt": prompts(8)[number]}, Idempotency_Key=f"key{number}")
        except OSError as error:
            answers.append(error)

    threads = [threading.Thread(target=ask_in_vain, args=(n,)) for n in range(8)]
    with serving(model, schedule, tmp_path, "--journal", str(journal)) as server:
        for thread in threads:
            thread.start()
        while len(list(journal.glob("*.json"))) < 8:
            time.sleep(0.001)
        server.process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join()
    left = [json.loads(path.read_text()) for path in journal.glob("*.json")]
    assert answers and len(left) == 8 and any(entry["tokens"] is None for entry in left)
    with serving(model, schedule, tmp_path, "--journal", str(journal)) as server:
        for number in range(8):
            sent = body | {"prompt": prompts(8)[number]}
            status, _, data = server.post("/v1/completions", sent, Idempotency_Key=f"key{number}")
            entry = next(e for e in left if e["body"]["prompt"] == sent["prompt"])
            again = server.post("/v1/completions", sent | {"seed": entry["body"]["seed"]})[2]
            assert status == 200 and tokens(json.loads(data)) == tokens(json.loads(again))
            assert json.loads(data)["id"] == f"cmpl-{entry['answer_id']}"
            assert json.loads(data)["created"] == entry["created"]
