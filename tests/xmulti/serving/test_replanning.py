"""A server whose models' popularity drifts: it plans again by itself, follows what is better, and loses no request."""

import asyncio
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from tests.xcore import small_specs
from tests.xserver.conftest import create_tiny, schedule_for, started
from tests.xserver.http.test_completions import expected
from tests.xserver.test_plan import ask, tokens
from xcore import document
from xcore.errors import InputError
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.estimate import Estimate
from xcore.specs.workload import Workload
from xmulti.serving import replanning
from xmulti.serving.replan import Replanned
from xmulti.serving.replanning import Replanning, ReplanOptions
from xmulti.sharing.replacement import FIRST_S
from xrunner.models.create import create_model
from xserver.admission.measured import RequestTiming
from xserver.http.answered import Answered
from xserver.http.answering import _admit, _count
from xserver.telemetry.observed import Observed

ESTIMATE = Estimate(1.0, 16.0, *[None] * 7)


def planned(rates, method="seallm"):
    """Models with a device each."""
    cluster = replace(small_specs.schedule("orca").cluster, nodes=1, devices_per_node=len(rates))
    models = (
        PlannedModel(name, (place,), small_specs.schedule("orca"), ESTIMATE, rate)
        for place, (name, rate) in enumerate(rates.items())
    )
    return Plan(Plan.VERSION, method, cluster, tuple(models))


SOON = ReplanOptions(0.05)
PLAN = planned({"chat": 4000.0, "code": 1000.0})
OTHER = planned({"chat": 1000.0, "code": 4000.0})


class Watching:
    """A server's replanning, whose models are asked far too often, and whose searches find these."""

    def __init__(self, monkeypatch, *found, plan=PLAN, options=SOON, follow=None, during=None):
        opened = SimpleNamespace(profile=small_specs.profile(), schedule=small_specs.schedule("orca"))
        observed = SimpleNamespace(latencies_s=lambda since_s: (0.5, 0.25))
        self.frontends = {
            model.name: SimpleNamespace(
                admission=object(),
                draining=False,
                arrived=0,
                link=SimpleNamespace(opened=opened),
                monitor=SimpleNamespace(observed=observed),
            )
            for model in plan.models
        }
        self.followed, self.asked, self.registry, left = [], [], CollectorRegistry(), list(found)

        def follows(asked):
            if follow:
                follow(asked)
            self.followed.append(asked)
            self.replanning.follows(asked)

        async def searched(replan_input):
            self.asked.append(replan_input)
            if during:
                during(self)
            return left.pop(0)

        monkeypatch.setattr(replanning, "LOOK_S", 0.01)
        monkeypatch.setattr(replanning, "in_a_process", searched)
        self.replanning = Replanning(self.frontends, plan, follows, self.registry, options)

    def run(self, seconds=1.0):
        """For so long, in which far more come to the second model than it was planned for."""

        async def serve():
            running = asyncio.ensure_future(self.replanning.run())
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                self.frontends["code"].arrived += 1000
                await asyncio.sleep(0.005)
            assert not running.done() or self.replanning._options is None
            running.cancel()

        asyncio.run(serve())
        return self

    def counted(self, outcome):
        return self.registry.get_sample_value("exegpt_replans_total", {"outcome": outcome})


def test_a_better_plan_is_followed(monkeypatch, capsys):
    watching = Watching(monkeypatch, Replanned(OTHER, "all models can reach 3 times their rates")).run()
    assert watching.followed == [OTHER] and len(watching.asked) == 1
    (asked,) = watching.asked
    assert asked.plan == PLAN and [seen.name for seen in asked.watched] == ["chat", "code"]
    assert asked.watched[1].rate_seq_s > 10_000 and asked.watched[0].rate_seq_s < 20
    assert asked.watched[0].latencies_s == (0.5, 0.25)
    state = watching.replanning.state
    assert state["plan"] == document.to_dict(OTHER) and state["watched_seq_s"] == {"chat": 1000.0, "code": 4000.0}
    assert state["last"] == "the server switches to another plan: all models can reach 3 times their rates"
    assert state["replans"] == {"followed": 1, "kept": 0, "failed": 0}
    assert [watching.counted(outcome) for outcome in ("followed", "kept", "failed")] == [1, 0, 0]
    printed = " ".join(capsys.readouterr().err.split())
    assert "popularity has changed to chat" in printed and state["last"] in printed


@pytest.mark.parametrize("failed", [False, True])
def test_the_plan_stays_where_no_other_is_better(monkeypatch, failed):
    """These rates have had their search: what drifts from them is looked out for, after the interval."""
    watching = Watching(monkeypatch, Replanned(None, "nothing fits", failed=failed)).run()
    assert watching.followed == [] and len(watching.asked) == 1
    state = watching.replanning.state
    assert state["plan"] == document.to_dict(PLAN) and state["last"] == "the models keep their plan: nothing fits"
    assert watching.counted("failed" if failed else "kept") == 1
    assert state["watched_seq_s"]["code"] == watching.asked[0].watched[1].rate_seq_s


def test_an_error_that_nobody_expected_ends_the_watching_and_not_the_server(monkeypatch, capsys):
    def broken(now_s):
        raise ZeroDivisionError("of nothing")

    watching = Watching(monkeypatch)
    monkeypatch.setattr(watching.replanning, "_look", broken)
    asyncio.run(watching.replanning.run())
    assert watching.replanning.state["watched_seq_s"] is None and watching.counted("failed") == 1
    assert "popularity is no longer watched: ZeroDivisionError: of nothing" in " ".join(capsys.readouterr().err.split())


def test_a_new_search_waits_for_the_interval(monkeypatch):
    found = [Replanned(None, "nothing is better")] * 9
    monkeypatch.setattr(replanning, "next_interval_s", lambda stayed_s, error: 0.2)
    watching = Watching(monkeypatch, *found)
    monkeypatch.setattr(watching.replanning, "_watch", lambda rates, begin_s: None)
    assert watching.run(0.3).asked == [], "nothing is watched"
    watching = Watching(monkeypatch, *found)
    watch = watching.replanning._watch
    monkeypatch.setattr(watching.replanning, "_watch", lambda _, begin_s: watch({"chat": 4e3, "code": 1e3}, begin_s))
    assert 2 <= len(watching.run(1.5).asked) <= 6


def test_the_first_interval_is_seallms():
    assert replanning.next_interval_s(None, 1.0) == FIRST_S


def test_a_plan_that_this_machine_cannot_follow_is_refused(monkeypatch):
    def refuse(_):
        raise InputError("The plan has device 7, and there are 2.")

    watching = Watching(monkeypatch, Replanned(OTHER, "better"), follow=refuse).run()
    state = watching.replanning.state
    assert watching.counted("failed") == 1 and state["plan"] == document.to_dict(PLAN)
    assert state["last"] == "the models keep their plan: The plan has device 7, and there are 2."


def test_an_administrators_plan_goes_before_what_was_searched_for_another(monkeypatch):
    theirs = planned({"chat": 9.0, "code": 9.0}, "by hand")
    found = Replanned(OTHER, "better")
    watching = Watching(monkeypatch, found, during=lambda watching: watching.replanning.follows(theirs)).run(0.5)
    assert watching.followed == [] and watching.replanning.plan is theirs
    assert watching.replanning.state["replans"] == {"followed": 0, "kept": 0, "failed": 0}


def test_a_plan_that_came_back_meanwhile_stays_all_the_same(monkeypatch):
    """An administrator's plan has failed during the search: what was followed before is followed again, and no search
    is to replace it.
    """
    theirs = planned({"chat": 9.0, "code": 9.0}, "by hand")

    def fails(watching):
        watching.replanning.follows(theirs)
        watching.replanning.goes_back(PLAN, "the engine of chat can't be started")

    watching = Watching(monkeypatch, Replanned(OTHER, "better"), during=fails).run(0.5)
    assert watching.followed == [] and watching.replanning.plan is PLAN
    state = watching.replanning.state
    assert state["watched_seq_s"] is None and state["replans"] == {"followed": 0, "kept": 0, "failed": 1}


@pytest.mark.parametrize("header, again", [(None, False), ("0", False), ("2", True)])
def test_what_a_client_says_it_has_sent_before_is_no_further_arrival(header, again):
    """OpenAI's client counts its tries: planned for are its requests, not its patience."""
    arrivals, exchange = [], SimpleNamespace(ended=lambda exchange: None)

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        arrivals.append(scope["state"]["arrival"])

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"x-stainless-retry-count", header.encode())] if header else []
    state = {"request_id": "1"}
    scope = {"type": "http", "path": "/asked", "method": "POST", "headers": headers, "state": state}
    asyncio.run(RequestTiming(app, exchange, ["/asked"])(scope, receive, None))
    (arrival,) = arrivals
    assert arrival.again == again
    choices = [SimpleNamespace(request=SimpleNamespace(prompt_ids=(1,), max_tokens=1))] * 3
    admitted = []
    admission = SimpleNamespace(admit=lambda lengths, arrived_s, cached: admitted.append(lengths))
    frontend = SimpleNamespace(check_ready=lambda: None, admission=admission, arrived=10)
    _count(len(choices), frontend, arrival)
    _admit(SimpleNamespace(choices=choices), frontend, arrival)
    assert frontend.arrived == (10 if again else 13) and admitted == [[(1, 1)] * 3]


def test_what_is_pinned_or_can_not_be_planned_again_stays(monkeypatch, capsys):
    assert Watching(monkeypatch, options=None).run(0.3).replanning.state["watched_seq_s"] is None
    assert capsys.readouterr().err == ""
    watching = Watching(monkeypatch, plan=planned({"chat": 4e3, "code": 1e3}, "by hand")).run(0.3)
    assert watching.asked == [] and watching.replanning.state["watched_seq_s"] is None
    assert "the plan does not follow changes of popularity" in " ".join(capsys.readouterr().err.split())


def test_what_was_answered_under_a_plan_is_what_its_promise_is_compared_with():
    """Neither what had come before it was followed, nor what wasn't answered by an engine."""
    observed = Observed(0.0)
    for ended_s, latency_s, outcome, kind in (
        (9.0, 2.0, "answered", "usual"),
        (12.0, 1.5, "answered", "usual"),
        (12.0, 4.0, "answered", "usual"),
        (13.0, 2.5, "answered", "long"),
        (13.0, 0.5, "answered", "joined"),
        (14.0, 0.1, "rejected", "none"),
    ):
        observed.answered(Answered("1", "chat", "/v1/completions", 200, outcome, kind, None, ended_s, latency_s))
    assert observed.latencies_s(10.0) == (1.5, 2.5)


@pytest.mark.parametrize("without", [{"admission": None}, {"draining": True}])
def test_a_server_that_takes_no_requests_plans_nothing(monkeypatch, without):
    watching = Watching(monkeypatch)
    for name, value in without.items():
        setattr(watching.frontends["chat"], name, value)
    assert watching.run(0.5).asked == []


HOT, COLD = 8.0, 0.5
"""Requests per second."""
NAMES = ["tiny", "wide", "deep"]
LENGTHS = Workload.fixed(16, 96)
PROMPTS = [[(31 * i + 7 * j) % 250 for j in range(16)] for i in range(12)]
OUTPUT = 96


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("popular")
    sizes = {"heads": 2, "kv_heads": 2, "vocab": 290, "context": 160}
    create_model(folder / "wide", "qwen2", layers=1, hidden=64, ffn=96, seed=1, **sizes)
    create_model(folder / "deep", "opt", layers=4, hidden=32, ffn=48, seed=2, **sizes)
    return {"tiny": create_tiny(folder / "tiny"), "wide": folder / "wide", "deep": folder / "deep"}


def served_plan(directories):
    """Two models that are asked often have a device each; the one that is asked rarely, and takes longest, shares the
    first one's.
    """
    share, models = Share("priority", pool="merged"), []
    for name, rate, device in (("tiny", HOT, 0), ("wide", HOT, 1), ("deep", COLD, 0)):
        schedule, alone = replace(schedule_for(directories[name]), workload=LENGTHS), device == 1
        own = PlannedModel(name, (device,), schedule, ESTIMATE, rate, directory=str(directories[name]))
        models.append(replace(own, share=None if alone else share))
    cluster = models[0].schedule.cluster
    small = replace(
        cluster.device, memory_bytes=1.5e9
    )  # half of it counts; a cache for all of the machine's takes long
    return Plan(Plan.VERSION, "seallm", replace(cluster, devices_per_node=2, device=small), tuple(models))


class Traffic:
    """Poisson arrivals at models, each answer of which is checked; a request that is refused comes again."""

    def __init__(self, server, want, rates):
        self._server, self._want, self._over = server, want, threading.Event()
        self._pool, self._asked, self.rates = ThreadPoolExecutor(100), [], rates
        self.accepted = []
        """When each request was sent that was accepted at once, and when its answer was there."""
        self._arriving = threading.Thread(target=self._arrive)

    def __enter__(self):
        self._arriving.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._arriving.join()
        self._pool.shutdown()

    def _arrive(self):
        drawn = random.Random(0)
        while not self._over.wait(drawn.expovariate(sum(self.rates.values()))):
            (name,) = drawn.choices(list(self.rates), list(self.rates.values()))
            self._asked.append(self._pool.submit(self._answered, name, drawn.choice(list(self._want[name]))))

    def _answered(self, name, number):
        """What is wrong with an answer, or nothing."""
        begin_s, again = time.monotonic(), False
        while True:
            status, answer = ask(self._server, name, PROMPTS[number], max_tokens=OUTPUT)
            if status not in (429, 503):
                if not again:
                    self.accepted.append((begin_s, time.monotonic()))
                right = status == 200 and tokens(answer) == self._want[name][number]
                return None if right else (name, number, status, answer)
            again = True
            time.sleep(0.2)

    @property
    def answers(self):
        return [asked.result() for asked in self._asked]


@pytest.mark.slow  # the search has what the engines leave of the CPUs
@pytest.mark.timeout(400)
def test_a_server_plans_again_when_two_models_swap_their_popularity(directories, tmp_path):
    document.write(tmp_path / "plan.json", served_plan(directories))
    theirs = {name: [expected(directories[name], prompt, OUTPUT) for prompt in PROMPTS] for name in NAMES}
    # transformers ends at EOS, and these requests ignore it
    want = {name: {i: out for i, out in enumerate(of_model) if len(out) == OUTPUT} for name, of_model in theirs.items()}
    assert all(len(of_model) >= 4 for of_model in want.values())
    with started(["--plan", str(tmp_path / "plan.json"), "--replan-after", "3s"], tmp_path, engines=3) as server:
        with Traffic(server, want, {"tiny": HOT, "wide": HOT, "deep": COLD}) as traffic:
            time.sleep(15)
            assert json.loads(server.get("/plan")[2])["replans"] == {"followed": 0, "kept": 0, "failed": 0}
            traffic.rates = {"tiny": HOT, "wide": COLD, "deep": HOT}
            until = time.monotonic() + 200
            while not json.loads(server.get("/plan")[2])["last"]:
                assert time.monotonic() < until, server.log.read_text()
                time.sleep(0.2)
            while server.get("/ready")[0] == 200:
                assert time.monotonic() < until, server.log.read_text()
                time.sleep(0.02)
            moved_s = time.monotonic()
            while server.get("/ready")[0] == 503:
                time.sleep(0.1)
            time.sleep(3)
        answers = traffic.answers
        assert len(answers) > 300 and [wrong for wrong in answers if wrong] == []
        assert any(begin_s < moved_s < end_s for begin_s, end_s in traffic.accepted), "some ran as the plan changed"
        shown, log = json.loads(server.get("/plan")[2]), " ".join(server.log.read_text().split())
        assert (
            shown["last"].startswith("the server switches to another plan: all models can reach ")
            and shown["last"] in log
        )
        watched = shown["watched_seq_s"]
        assert watched["deep"] == pytest.approx(HOT, rel=0.5) and watched["wide"] < HOT / 3
        places = {model["name"]: model["devices"] for model in shown["plan"]["models"]}
        assert places["tiny"] != places["deep"], "those that are asked often have no device together"
        assert 'exegpt_replans_total{model_name="",outcome="followed"} 1.0' in server.get("/metrics")[2].decode()
        assert "the plan has changed: " in log and "popularity has changed to tiny " in log
