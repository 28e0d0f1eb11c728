"""Several models on one device: their tokens, the memory that they share, and whose turn it is."""

import dataclasses
import json

import pytest

from tests.xrunner.cells import requests, schedule, stages
from tests.xrunner.core.conftest import tokens_of_transformers
from tests.xrunner.stand_in import StandIn
from xcore import document
from xcore.batching import Hints
from xcore.errors import InputError
from xcore.orders.doubling_budget import DoublingBudget
from xcore.policies import quota_adaptation
from xcore.policies.one_phase import OnePhasePolicy
from xcore.policies.sharing import SpatialSharing
from xcore.requests.engine_protocol import TokenEvent
from xcore.requests.request import Request, Result
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.model import ModelSpec
from xcore.specs.request_times import summarise
from xcore.specs.workload import RequestLengths
from xmulti.rank.rank_unit import RankTenant, RankUnit
from xmulti.sharing.plan_order import PlanOrder
from xmulti.sharing.plan_replay import replay_models
from xprofiler.roofline import roofline_profile
from xrunner.comm.ranks import Ranks
from xrunner.core.driver import Options
from xrunner.core.engine import Engine
from xrunner.core.shared_cache import shared_caches
from xrunner.models import load_model

FEW = 6
"""Blocks of each model: enough for its longest request alone."""
SHARES = [Share("time"), Share("time", pool="merged"), Share("priority", pool="merged"), Share("space", 0.5)]


@pytest.fixture(scope="module")
def theirs(directories):
    return {name: tokens_of_transformers(path) for name, path in directories.items()}


@pytest.fixture
def profiles(directories):
    cluster = parse_cluster("1xA40")
    specs = {name: ModelSpec.from_directory(path) for name, path in directories.items()}
    return {name: roofline_profile(spec, cluster, "fp32") for name, spec in specs.items()}


def planned(directories, share, kv_blocks=FEW):
    models = []
    for name, path in directories.items():
        spec = ModelSpec.from_directory(path)
        plan = schedule(spec, "orca", kv_blocks=kv_blocks, admission="grow", max_num_seqs=6, prefills_per_step=2)
        models.append(PlannedModel(name, (0,), plan, summarise((), 0.0), 1.0, share=share))
    return models


def alone(unit):
    assert len(unit.running) == 1


def run(unit, todo, every=0, look=alone):
    """Add all requests, or one of each model after so many steps; results by model and id, and the jobs in order. After
    every step that began a job, `look` at the unit.
    """
    results, jobs = {name: {} for name in todo}, []
    left = {name: list(some) for name, some in todo.items()}
    tokens = {name: {} for name in todo}
    steps = 0
    while any(left.values()) or not unit.idle:
        for name, some in left.items():
            while some and (not every or steps % every == 0):
                unit.add(name, some.pop(0))
                if every:
                    break
        if unit.step():
            look(unit)
            jobs.append(unit.running[-1].tenant.name)
        elif unit.running:
            unit.wait()
        for name in todo:
            for event in unit.take(name):
                if isinstance(event, TokenEvent):
                    tokens[name].setdefault(event.request_id, []).append(event.token)
                else:
                    assert isinstance(event, Result) and event.id not in results[name]
                    results[name][event.id] = event
        steps += 1
    assert all(list(r.output_ids) == tokens[n][i] for n, some in results.items() for i, r in some.items())
    return results, jobs


@pytest.mark.parametrize(
    ("share", "every"),
    [
        pytest.param(
            share, every, id=f"{share.by}-{share.pool}-{every}", marks=pytest.mark.slow if every and later else ()
        )
        for later, share in enumerate(SHARES)
        for every in (0, 3)
    ],
)
def test_tokens_are_transformers_though_caches_are_short(directories, theirs, share, every):
    unit = RankUnit.load(planned(directories, share), directories)
    unit.open()
    results, _ = run(unit, {name: requests() for name in directories}, every)
    if share.by != "priority":  # which lets so few in at a time that their tokens have room
        assert sum(tenant.ledger.preemptions for tenant in unit.tenants) > 0, "the caches are to be too small"
    for tenant in unit.tenants:
        tenant.ledger.check()
        assert tenant.ledger.pool.available == tenant.ledger.pool.total
    unit.drain()
    unit.close()
    for name, want in theirs.items():
        assert {i: list(r.output_ids) for i, r in results[name].items()} == {
            i: list(out) for i, (out, _) in want.items()
        }


def test_a_model_takes_the_memory_that_the_other_does_not_need(directories):
    """Under skewed load: one model's requests alone preempt each other over quotas, and have room in merged blocks."""
    counts = {}
    for pool in ("quotas", "merged"):
        unit = RankUnit.load(planned(directories, Share("time", pool=pool), 14), directories)
        unit.open()
        run(unit, {"llama": requests()})
        counts[pool] = unit.tenants[0].ledger.preemptions
        unit.drain()
        unit.close()
    assert counts["merged"] < counts["quotas"]


def test_a_quota_grows_where_the_other_model_is_idle(directories, theirs, monkeypatch):
    """However many requests are usual; fewer of its sequences are preempted, and their tokens stay."""
    monkeypatch.setattr(quota_adaptation, "WINDOW", 4)
    monkeypatch.setattr(quota_adaptation, "CROWDED", 0.0)
    models, preempted, quotas = planned(directories, SHARES[0], 14), {}, {}
    todo = [Request(f"{i}-{r.id}", r.prompt_ids, r.max_tokens) for i in range(4) for r in requests()]
    for adapts in (False, True):
        unit = RankUnit.load(models, directories)
        for tenant in unit.tenants:
            tenant.least = tenant.least if adapts else None
        unit.open()
        results, _ = run(unit, {"llama": todo})
        preempted[adapts] = unit.tenants[0].ledger.preemptions
        quotas[adapts] = [tenant.ledger.pool.quota for tenant in unit.tenants]
        unit.drain()
        unit.close()
        want = {f"{i}-{name}": list(out) for i in range(4) for name, (out, _) in theirs["llama"].items()}
        assert {name: list(result.output_ids) for name, result in results["llama"].items()} == want
    assert preempted[True] < preempted[False]
    (busy, idle), (before, was_idle) = quotas[True], quotas[False]
    assert busy > before and busy + idle == before + was_idle


@pytest.mark.parametrize(
    ("share", "learned"),
    [(SHARES[0], False), (SHARES[1], False), (SHARES[0], True), (SHARES[1], True), (SHARES[2], True)],
    ids=lambda value: f"{value.by}-{value.pool}" if isinstance(value, Share) else "learned" if value else "fcfs",
)
def test_jobs_come_in_the_order_of_the_event_simulator(directories, theirs, share, learned, profiles):
    """Of requests that are there from the beginning: whose turn it is depends on no time."""
    models = planned(directories, share, 12)
    unit = RankUnit.load(models, directories)
    todo = {name: requests() for name in directories}
    order, options = None, None
    if learned:  # one model prefers its shortest requests, the other its longest
        signs = dict(zip(directories, (-1, 1), strict=True))
        scores = {name: [sign * float(r.max_tokens % 5) for r in todo[name]] for name, sign in signs.items()}
        order = PlanOrder("learned", scores, scores)
        options = {m.name: Options(order=order.of(m), hints=score_of(scores[m.name])) for m in models}
    unit.open(options=options)
    results, jobs = run(unit, todo)
    for name, want in theirs.items():
        assert {i: list(r.output_ids) for i, r in results[name].items()} == {i: list(o) for i, (o, _) in want.items()}
    preempted = {tenant.name: tenant.ledger.preemptions for tenant in unit.tenants}
    unit.drain()
    unit.close()
    lengths = {name: [RequestLengths(len(r.prompt_ids), r.max_tokens) for r in some] for name, some in todo.items()}
    replays = replay_models(models, profiles, lengths, timeline=True, order=order)
    spans = sorted((s.start_s, name) for name, one in replays.items() for s in one.spans)
    rows = [name for _, name in spans]
    assert [j for j, before in zip(jobs, [None, *jobs], strict=False) if j != before] == [
        r for r, before in zip(rows, [None, *rows], strict=False) if r != before
    ]
    assert preempted == {name: one.preemptions for name, one in replays.items()}


def score_of(scores):
    """Return the function that gives each request its hints; a request's id is its place in `scores`."""
    return lambda request: Hints(score=scores[int(request.id)])


@pytest.mark.parametrize("every", [0, 3])
def test_models_compute_beside_each_other_on_a_gpu(directories, theirs, every):
    """What one has queued isn't complete when the other's begins, and their tokens are transformers'."""
    tenants = []
    for model in planned(directories, Share("space", 0.5)):
        engine = Engine(load_model(directories[model.name]), model.schedule, gpu=StandIn())
        tenants.append(RankTenant(model.name, engine, OnePhasePolicy.of(model.schedule, 0.5)))
    unit = RankUnit(tenants, SpatialSharing())
    unit.open()
    at_once = set()

    def look(unit):
        running = unit.running
        assert len({job.tenant.name for job in running}) == len(running), "a model does one thing at a time"
        assert len(running) == 1 or unit.used <= 1 + SpatialSharing.OVERLAP
        at_once.add(tuple(sorted(job.phase for job in running)))

    results, _ = run(unit, {name: requests() for name in directories}, every, look)
    assert ("decode", "decode") in at_once and ("encode", "encode") not in at_once
    for tenant in unit.tenants:
        assert tenant.engine.worker.gpu.replayed > 0 and tenant.ledger.preemptions > 0
        assert tenant.ledger.pool.available == tenant.ledger.pool.total
    unit.drain()
    unit.close()
    for name, want in theirs.items():
        assert {i: list(r.output_ids) for i, r in results[name].items()} == {
            i: list(out) for i, (out, _) in want.items()
        }


class Watched(DoublingBudget):
    """Keeps what it is told that steps took."""

    def __init__(self, told):
        super().__init__(executed=True)
        self.told = told

    def fresh(self):
        return Watched(self.told)

    def ran(self, step, seconds, now):
        self.told.append(seconds)
        super().ran(step, seconds, now)


def test_the_service_whose_requests_are_shorter_comes_first_by_priority(directories):
    """Though both have waited as long; the order is told what each of its jobs has taken."""
    told = {name: [] for name in directories}
    hints = {"llama": Hints(service_time_s=1e-6), "gpt2": Hints(service_time_s=1e6)}
    options = {n: Options(order=Watched(told[n]), hints=lambda _, known=hints[n]: known) for n in directories}
    unit = RankUnit.load(planned(directories, SHARES[2], 60), directories)
    unit.open(options=options)
    _, jobs = run(unit, {name: requests() for name in ("gpt2", "llama")})
    first = jobs.count("llama")
    assert set(jobs[:first]) == {"llama"} and set(jobs[first:]) == {"gpt2"}
    for tenant in unit.tenants:
        assert len(told[tenant.name]) == jobs.count(tenant.name)
        assert 0.8 * tenant.busy_s < sum(told[tenant.name]) <= tenant.busy_s
    unit.drain()
    unit.close()


def test_rows_that_fill_up_on_a_gpu_write_to_no_block_of_a_memory_that_models_share(directories, theirs):
    """Decoding graphs have such rows: their block is no model's, and within the memory."""
    models = planned(directories, Share("time", pool="merged"), 30)
    shared = shared_caches([model.schedule for model in models], "merged", Ranks())
    merged = shared[0].pool._merged
    for model, one in zip(models, shared, strict=True):
        engine = Engine(load_model(directories[model.name]), model.schedule, gpu=StandIn(), shared=one)
        ran = engine.run(requests())
        assert engine.worker.gpu.replayed > 0
        want = {i: list(out) for i, (out, _) in theirs[model.name].items()}
        assert {result.id: list(result.output_ids) for result in ran.results} == want
        begin, size = one.cache.keys[0].data_ptr(), one.cache.keys[0].untyped_storage().nbytes()
        for layer in one.cache.keys + one.cache.values:
            piece = layer[one.cache.last]
            at = piece.data_ptr() - begin
            assert merged.total * merged.bytes <= at <= size - piece.nbytes


def split(model):
    """A planned model with each layer on two devices."""
    spec = model.schedule.model.spec
    plan = dataclasses.replace(
        model.schedule,
        stages=stages((2,), spec),
        cluster=dataclasses.replace(model.schedule.cluster, devices_per_node=2),
    )
    return dataclasses.replace(model, devices=(0, 1), schedule=plan)


@pytest.mark.slow
def test_models_share_two_devices(job, tmp_path, directories, theirs):
    """Each layer of both models is on both; their tokens are transformers', though they preempt each other."""
    for share in SHARES[:2]:
        models = tuple(
            dataclasses.replace(split(model), directory=str(directories[model.name]))
            for model in planned(directories, share)
        )
        plan = Plan(Plan.VERSION, "exegpt", models[0].schedule.cluster, models)
        document.write(tmp_path / f"plan-{share.pool}.json", plan)
    done = job(2, "-m", "tests.xrunner.shared_unit", tmp_path)
    assert done.returncode == 0, done.stderr
    for share in SHARES[:2]:
        ran = json.loads((tmp_path / f"ran-plan-{share.pool}.json").read_text())
        for name, want in theirs.items():
            assert ran["tokens"][name] == {i: list(out) for i, (out, _) in want.items()}, share
        assert sum(ran["preempted"].values()) > 0


def test_a_request_that_the_memory_cannot_hold_is_refused(directories):
    unit = RankUnit.load(planned(directories, SHARES[1], 1), directories)
    unit.open()
    with pytest.raises(InputError, match="needs 6 KV blocks"):
        unit.add("llama", Request("a", tuple(range(60)), 30))
    unit.drain()
    unit.close()
