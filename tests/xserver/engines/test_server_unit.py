"""Units: engines that fail or stall, and the requests of a journal, by model."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from tests.xcore import small_specs
from tests.xserver.conftest import schedule_for
from xcore.requests.engine_protocol import Opened
from xcore.requests.request import Request
from xserver.engines.engine_link import EngineLink
from xserver.engines.server_unit import ServerUnit
from xserver.engines.unit_options import EngineUnitOptions, UnitModel
from xserver.http.api import resume_entries
from xserver.http.api_error import ApiError
from xserver.http.frontend import Frontend, without_bound
from xserver.http.frontends import Frontends
from xserver.http.journal import Journal
from xserver.http.served_model import ServedModel
from xserver.telemetry.metrics_page import render


class Engine:
    """Ends with these exit codes, one after the other; the last one runs until it is killed."""

    restarts, lost = True, False

    def __init__(self, *codes):
        self.codes, self.starts, self.killed = list(codes), 0, asyncio.Event()

    async def start(self, documents):
        self.starts += 1

    async def wait(self):
        if self.codes:
            return self.codes.pop(0)
        await self.killed.wait()
        return -9

    async def kill(self):
        self.killed.set()


class SilentLink(EngineLink):
    """Of an engine that has been silent for so long, and has started."""

    silent_s = 0.0

    def __init__(self, silent_s=0.0):
        super().__init__()
        self.silent_s, self.opened = silent_s, object()


def frontends(model, *links, journal=None):
    """Models a, b, …, with these links; an engine counts as stalled after 5 s."""
    named = [ServedModel.read(model, name) for name in "abc"[: len(links)]]
    made = [Frontend(name, link, "", None, 1.0, 8, journal=journal) for name, link in zip(named, links, strict=True)]
    for frontend in made:
        frontend.admission = type("Cycle", (), {"cycle_s": 0.1})()
    return made


def unit_of(made, tmp_path, engine, schedule="--plan"):
    models = tuple(UnitModel(Path(), place=place) for place in range(len(made)))

    async def resume(_):
        pass

    options = EngineUnitOptions(models, (schedule, "file"))
    unit = ServerUnit(options, made, tmp_path, "http://here", resume, asyncio.Semaphore(1))
    unit._engine = engine
    return unit


@pytest.mark.parametrize(("schedule", "starts"), [("--plan", 5), ("--threads", 1)])
def test_an_engine_that_fails_in_a_row_is_given_up(model, tmp_path, schedule, starts):
    """At once where no other could follow a schedule that is known."""

    async def run():
        made, engine = frontends(model, EngineLink(), EngineLink()), Engine(9, 9, 9, 9, 4, 5, 6)
        waiting = [frontend.link.add(Request("", (1,), 5)) for frontend in made]
        unit = unit_of(made, tmp_path, engine, schedule)
        code = await unit.run()
        assert not any(output.ended for output in waiting), "the plan before may answer them"
        unit.fail()
        return code, engine.starts, {output.ended.reason for output in waiting}, {f.monitor.restarts for f in made}

    assert asyncio.run(run()) == ({5: 4, 1: 9}[starts], starts, {"error"}, {starts - 1})


@pytest.mark.parametrize(
    ("silent", "killed"),
    [((6.0, 0.0), True), ((6.0, 6.0), True), ((6.0, 1.0), False), ((1.0, 0.0), False), ((0.0, 0.0), False)],
    ids=str,
)
def test_an_engine_has_stalled_when_no_model_that_waits_gets_anything(model, tmp_path, silent, killed):
    """0: the model has no sequences."""

    async def run():
        made, engine = frontends(model, *map(SilentLink, silent)), Engine()
        unit = unit_of(made, tmp_path, engine)
        running = asyncio.ensure_future(unit.run())
        await asyncio.sleep(0.3)
        running.cancel()
        return engine.killed.is_set()

    assert asyncio.run(run()) == killed


def test_a_unit_that_was_given_up_watches_its_models_no_longer(model, tmp_path):
    """Else the stall of one model's next engine would end what the other models' engines take."""

    async def run():
        links = SilentLink(0.0), SilentLink(0.0)
        made, engine = frontends(model, *links), Engine()
        unit = unit_of(made, tmp_path, engine)
        running = asyncio.ensure_future(unit.run())
        await asyncio.sleep(0.2)
        running.cancel()
        await unit.give_up()
        await asyncio.gather(running, return_exceptions=True)
        for frontend in made:  # other units' engines are there
            frontend.admission = type("Cycle", (), {"cycle_s": 0.1})()
        links[0].silent_s = 6.0
        await asyncio.sleep(0.2)
        return [frontend.admission is not None for frontend in made]

    assert asyncio.run(run()) == [True, True]


def test_models_of_one_engine_are_lost_together(model, tmp_path):
    """Their connections end one after the other: no model takes requests in between that wait for its restart."""
    made = frontends(model, EngineLink(), EngineLink())
    unit_of(made, tmp_path, Engine())
    made[1].link.on_lost()
    assert [frontend.admission for frontend in made] == [None, None]


def test_journalled_requests_are_run_by_the_model_that_they_name(model, tmp_path):
    for name in ("a", "b", "gone", None):
        body = {"prompt": "a"} | ({"model": name} if name else {})
        entry = {"path": "/v1/completions", "asked": "", "body": body, "ended_s": None}
        (tmp_path / f"{name}.json").write_text(json.dumps(entry))

    def names(made, frontend):
        return sorted(entry.name for entry in Frontends(made).unfinished(frontend))

    several = frontends(model, EngineLink(), EngineLink(), journal=Journal(tmp_path, 1.0))
    assert [names(several, frontend) for frontend in several] == [["a"], ["b"]]
    (only,) = frontends(model, EngineLink(), journal=Journal(tmp_path, 1.0))
    assert names([only], only) == ["None", "a", "b", "gone"]  # as it always was: the name may have changed


def test_a_request_without_a_name_is_for_the_only_model(model):
    (only,) = made = frontends(model, EngineLink())
    alone = Frontends(made)
    assert alone.of(None) is alone.of("a") is only
    several = Frontends(frontends(model, EngineLink(), EngineLink()))
    assert several.of("b").model.name == "b"
    for name, status in ((None, 400), ("c", 404)):
        with pytest.raises(ApiError, match="'a', 'b'") as raised:
            several.of(name)
        assert raised.value.status == status


def test_what_concerns_no_model_alone_is_counted_on_the_page_of_all(model):
    for links in ([EngineLink()], [EngineLink(), EngineLink()]):
        every = Frontends(frontends(model, *links))
        Counter("exegpt_concerns_all", "A count.", registry=every.registry).inc(3)
        text, _ = render(every.counted, "")
        (family,) = [f for f in text_string_to_metric_families(text.decode()) if f.name == "exegpt_concerns_all"]
        (value,) = [sample.value for sample in family.samples if sample.name.endswith("_total")]
        assert value == 3


def test_models_that_share_leave_the_bound_out_and_say_so_once(model):
    opened = Opened(replace(schedule_for(model), latency_bound_s=5.0), small_specs.profile(), 2.0, ("measured",), 0.0)
    once = without_bound(opened, ("b", "c"))
    assert once == without_bound(once, ("b", "c"))
    assert once.schedule == schedule_for(model) and once.goodput_seq_s is None
    assert once.assumptions == ("measured", "shares its devices with b, c: no latency bound is promised")


def test_a_server_is_ready_when_all_models_are(model):
    made = frontends(model, EngineLink(), EngineLink())
    Frontends(made).check_ready()
    made[1].admission = None
    with pytest.raises(ApiError, match="starting"):
        Frontends(made).check_ready()


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
def test_one_page_has_each_models_series(model, accept):
    text, kind = render(Frontends(frontends(model, EngineLink(), EngineLink())).counted, accept)
    assert kind.startswith(accept or "text/plain")
    described = re.findall(r"^# TYPE (\S+)", text.decode(), re.MULTILINE)
    assert len(described) == len(set(described)) > 20
    families = text_string_to_metric_families(text.decode())
    builds = [s.labels for family in families for s in family.samples if s.name == "exegpt_build_info"]
    assert [(labels["model_name"], labels["model"]) for labels in builds] == [("a", "a"), ("b", "b")]


def test_a_journalled_request_that_can_not_be_run_any_more_keeps_no_other_from_it(model, tmp_path):
    """Its prompt may have been for a model with a longer context, or for another version of this server."""
    for name, count in (("long", 10_000), ("other", 3), ("short", 3)):
        body = {"prompt": [5] * count, "max_tokens": 4, "seed": 1}
        path = "/v1/other" if name == "other" else "/v1/completions"
        entry = {"path": path, "asked": "", "body": body, "ended_s": None}
        (tmp_path / f"{name}.json").write_text(json.dumps(entry))

    async def run():
        (frontend,) = frontends(model, EngineLink(), journal=Journal(tmp_path, 1.0))
        entries = sorted(frontend.journal.unfinished, key=lambda entry: entry.name)
        await resume_entries(frontend, entries)
        entries[2].reading.cancel()
        return [entry.name for entry in frontend.journal.unfinished], [o.request.prompt_ids for o in entries[2].outputs]

    assert asyncio.run(run()) == (["short"], [(5, 5, 5)])
    assert [path.name for path in tmp_path.iterdir()] == ["short.json"]
