"""A switch of schedule: afterwards the running engine has the new schedule's settings, in every field."""

from dataclasses import fields, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import split
from xcore.policies import TRAITS, control_variables
from xcore.requests.request import Request, Result
from xcore.specs.change import OF_ONE_ENGINE, takes_over_in_place
from xcore.specs.cluster import local_cluster
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import Workload
from xrunner.core import adaptation
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.rank.warm_up import Extent

VARIABLES = {
    "static": {"encode_batch": (2, 3)},
    "orca": {"max_num_seqs": (2, 5), "prefills_per_step": (1, 2)},
    "chunked": {"max_num_seqs": (3, 6), "max_num_batched_tokens": (9, 14)},
    "rra": {"encode_batch": (2, 3), "decode_batch": (4, 5), "decode_iterations": (2, 4)},
}
TODO = [Request(str(i), tuple((3 * i + j) % 200 for j in range(5 + 7 * i % 20)), 6 + i, True) for i in range(8)]


@pytest.fixture(scope="module")
def model(directories):
    return load_model(directories["llama"])


@pytest.fixture(scope="module")
def undisturbed(model):
    plan = schedule_of(model, "orca", {"max_num_seqs": 3, "prefills_per_step": 1})
    return {result.id: result.output_ids for result in Engine(model, plan).run(TODO).results}


def schedule_of(model, policy, variables, **cache):
    return Schedule(
        version=Schedule.VERSION,
        policy=policy,
        model=ModelReference(model.spec, model.spec.fingerprint),
        cluster=local_cluster(),
        workload=Workload.fixed(16, 8),
        profile=ProfileReference("roofline", "0"),
        stages=(Stage((0,), 1, "both", None, (0, model.spec.layers)),),
        dtype="fp32",
        kv_dtype="fp32",
        **split(policy, {"kv_blocks": 24} | cache | variables),
    )


@st.composite
def schedules(draw, model):
    policy = draw(st.sampled_from(sorted(VARIABLES)))
    variables = {name: draw(st.sampled_from(values)) for name, values in VARIABLES[policy].items()}
    cache = {
        "admission": draw(st.sampled_from(["reserve", "grow"])),
        "prefix_caching": draw(st.booleans()) and TRAITS[policy].caches_prefixes,
        "kv_blocks": draw(st.sampled_from([12, 24])),
        "block_size": draw(st.sampled_from([8, 16])),
        "micro_batches": draw(st.sampled_from([None, 1, 2])),
        "encode_micro_batches": draw(st.sampled_from([None, 2])),
    }
    return schedule_of(model, policy, variables, **cache)


def settings_of(engine):
    """What decides in an engine: read off its parts, not off the schedule that it was given."""
    driver = engine._driver
    ledger, lane = driver.ledger, driver.lanes[-1]
    return {
        "policy": (type(driver.policy), {k: v for k, v in vars(driver.policy).items() if k in control_variables()}),
        "adjust": getattr(getattr(driver.policy, "joining", None), "adjustment", None) is not None,
        "admission": type(ledger.admission),
        "prefix_caching": (type(ledger.pool), driver.outputs.__dict__.get("_keyed")),
        "blocks": (ledger.pool.total, ledger.pool.block_size, engine.worker.cache.values[0].shape[2]),
        "early_termination": ledger.early_termination,
        "shares_in_step": ledger.shares_in_step,
        "micro_batching": lane._micro_batching,
        "layers": (engine.place.layers, engine.place.replica, engine.model.dtype),
    }


def opened(engine):
    engine.open(Extent.within(engine.schedule, 30, 20))
    return engine


def take(events, results):
    for event in events:
        if isinstance(event, Result):
            assert event.id not in results
            results[event.id] = event


def switched(engine, new, results):
    """The engine after a switch: the same, or the next where it moves."""
    engine.follow(new)
    while not engine.changes and not engine.moving:
        take(engine.step(), results)
    if not engine.moving:
        return engine
    unfinished = [request for request in TODO if request.id in engine._unfinished]
    engine.surrender()
    after = opened(engine.onward("", new))
    for request in unfinished:
        after.add(request)
    return after


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_after_a_switch_the_engine_has_the_new_schedules_settings(model, undisturbed, data):
    """A fresh engine of the new schedule is the oracle; requests under way end with the tokens of undisturbed ones."""
    old, new = data.draw(schedules(model)), data.draw(schedules(model))
    expected = settings_of(opened(Engine(model, new)))
    engine, results = opened(Engine(model, old)), {}
    for request in TODO:
        engine.add(request)
    for _ in range(data.draw(st.integers(0, 6))):
        take(engine.step(), results)
    engine = switched(engine, new, results)
    found = settings_of(engine)
    assert found == expected
    while not engine.idle:
        take(engine.step(), results)
    assert {name: result.output_ids for name, result in results.items()} == undisturbed


def test_every_field_is_a_setting_or_known_to_decide_nothing(model):
    """A field that is added must be compared by `same`, or listed here."""
    neutral = {"version", "model", "cluster", "workload", "profile", "bound", "percentile"}
    neutral |= {"latency_bound_s", "ttft_bound_s", "tpot_bound_s"}
    assert {field.name for field in fields(Schedule)} == neutral | {*OF_ONE_ENGINE, "kv_blocks", "control", "adjust"}
    for traits in TRAITS.values():
        control = TRAITS[traits.name].record(dict.fromkeys(traits.searched, 1))
        assert {*control.variables} - {*control.decisions} == {*[traits.name_of("target")]} - {None}


@pytest.mark.parametrize("change", [{"admission": "grow"}, {"prefix_caching": True}, {"block_size": 8}])
def test_another_cache_is_another_schedule_that_does_not_take_over_in_place(model, change):
    held = schedule_of(model, "orca", {"max_num_seqs": 3, "prefills_per_step": 1})
    new = replace(held, **change)
    assert not adaptation.same(held, new) and not takes_over_in_place(new, held)
