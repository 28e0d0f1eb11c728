"""Decisions of rescheduling, with known answers of its searches: what stays, and when a move is worth its cost."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.xcore.small_specs import MODEL, changed, schedule
from tests.xsimulator.replay.test_event_simulator import disaggregated, stages_of
from xcore.policies import TRAITS
from xcore.specs.change import takes_over_in_place
from xcore.specs.cluster import parse_cluster
from xscheduler import reschedule
from xscheduler.reschedule import (
    WORTH,
    _degrees,
    _keeps_cache_of,
    _with_cache_of,
    best,
    best_for_arrivals,
)
from xscheduler.search import Search
from xscheduler.spaces import POLICIES
from xscheduler.tuned import Alternative, Tuned


@pytest.mark.parametrize(("found", "size", "blocks"), [(101, 32, 50), (101, 8, 202), (1, 32, 1), (100, 16, 100)])
def test_a_cache_keeps_its_tokens_in_blocks_of_the_held_size(found, size, blocks):
    held = schedule("orca", kv_blocks=7, block_size=size, admission="grow", prefix_caching=True)
    kept = _with_cache_of(held, schedule("orca", kv_blocks=found))
    assert (kept.kv_blocks, kept.block_size, kept.admission, kept.prefix_caching) == (blocks, size, "grow", True)


@pytest.mark.parametrize(
    ("policy", "found", "share"), [("rra", "rra", 0.1), ("rra", "orca", 0.3), ("orca", "rra", 0.3)]
)
def test_batches_are_adjusted_as_before_where_both_policies_adjust(policy, found, share):
    held, new = schedule(policy, adjust=0.1), schedule(found, adjust=0.3)
    assert {name: TRAITS[name].adjustable for name in ("rra", "orca")} == {"rra": True, "orca": False}
    assert _with_cache_of(held, new).adjust == share


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("caches", [False, True])
def test_a_run_on_one_device_may_take_policies_that_have_what_its_cache_does(grows, caches):
    held = schedule("chunked", admission="grow" if grows else "reserve", prefix_caching=caches)
    able = {
        name
        for name in POLICIES
        if not TRAITS[name].disaggregated
        and (TRAITS[name].grows or not grows)
        and (TRAITS[name].caches_prefixes or not caches)
    }
    assert {name for name in POLICIES if _keeps_cache_of(held, TRAITS[name])} == able
    assert ("static" in able) == (not (grows or caches) or (TRAITS["static"].grows and not caches))


@pytest.mark.parametrize(
    ("tps", "degrees"),
    [((1, 1), {"tp_degree": 1}), ((2, 1, 1), {"tp_degree": 2, "tp_gpus": 2}), ((4, 4), {"tp_degree": 4, "tp_gpus": 8})],
)
def test_a_search_in_place_has_the_held_tensor_parallelism(tps, degrees):
    (stage,) = schedule("orca").stages
    held = SimpleNamespace(stages=tuple(replace(stage, tp=tp) for tp in tps))
    assert _degrees(held) == degrees


HELD = schedule(
    "rra", stages=stages_of(MODEL, "both", 0, 4), cluster=parse_cluster("4xA40"), kv_blocks=100, latency_bound_s=5.0
)
OTHER = replace(HELD, stages=stages_of(MODEL, "both", 0, 2), kv_blocks=150)
SETTING = SimpleNamespace(model=MODEL)


def tuned(found, rate):
    estimate = found and SimpleNamespace(throughput_tok_s=rate)
    reasons = (Alternative("rra", found, None, "it is too slow"),)
    return Tuned(found, estimate, reasons, Search("bnb", 1, 1, 0.1), 9.0, ())


def searched(monkeypatch, *answers):
    """Searches with these answers, one after the other, and what they are asked."""
    asked, left = [], list(answers)

    def search(setting, bound_s, **options):
        asked.append(options)
        return left.pop(0)

    monkeypatch.setattr("xscheduler.setting_search.search_schedule", search)
    return asked


@pytest.mark.parametrize(("share", "moves"), [(1 - 0.9 * WORTH, False), (1 - WORTH, False), (1 - 1.1 * WORTH, True)])
def test_a_larger_cache_must_bring_a_tenth_more(monkeypatch, share, moves):
    free, there = replace(HELD, kv_blocks=300, block_size=32), replace(HELD, kv_blocks=90)
    held = replace(HELD, block_size=32)
    asked = searched(monkeypatch, tuned(free, 100.0), tuned(there, 100.0 * share))
    assert not takes_over_in_place(_with_cache_of(held, free), held)
    found, why = best(SETTING, held, most=9)
    assert found == _with_cache_of(held, free if moves else there) and not why
    assert asked[0]["fixed"] == {"replicas": 1} and asked[0]["most_resident"] == 9 and asked[0]["policies"] == ("rra",)
    assert asked[1]["fixed"] == {"replicas": 1, **_degrees(held)} and asked[1]["kv_blocks"] == 200
    assert asked[0]["admission"] == ("reserve",)


def test_what_takes_over_in_place_needs_no_second_search(monkeypatch):
    asked = searched(monkeypatch, tuned(replace(HELD, kv_blocks=99), 100.0))
    assert best(SETTING, HELD) == (replace(HELD, kv_blocks=99), "") and len(asked) == 1


def test_a_schedule_of_other_devices_is_taken_by_no_run(monkeypatch):
    """The best in place is, however slow; and without one, the run keeps its schedule."""
    there = replace(HELD, kv_blocks=90)
    searched(monkeypatch, tuned(OTHER, 100.0), tuned(there, 1.0))
    assert best(SETTING, HELD).schedule == there
    searched(monkeypatch, tuned(OTHER, 100.0), tuned(None, 0.0))
    found, why = best(SETTING, HELD)
    assert found is None and why == "the best schedule for the new lengths needs 2 devices, but this run has 4"
    searched(monkeypatch, tuned(None, 0.0))
    found, why = best(SETTING, HELD)
    assert found is None and why.startswith("No schedule meets the bound of 5s: the lowest reachable latency is 9 s")


@pytest.mark.parametrize(("blocks", "kept"), [(90, 90), (109, 100), (110, 100), (112, 112)])
def test_sides_whose_cache_is_a_little_larger_stay_with_what_they_have(monkeypatch, blocks, kept):
    """A tenth more blocks than are held; beyond, the run moves to them."""
    held = disaggregated(kv_blocks=100, latency_bound_s=5.0)
    asked = searched(monkeypatch, tuned(replace(held, kv_blocks=blocks), 100.0))
    assert best(SETTING, held, most=3).schedule.kv_blocks == kept
    assert asked[0]["policies"] == ("waa-c", "waa-m") and asked[0]["most_resident"] is None and len(asked) == 1


@pytest.mark.parametrize("several", [False, True])
def test_a_server_keeps_its_policy_on_several_devices_and_its_bound(monkeypatch, several):
    held = changed(schedule("orca"), latency_bound_s=5.0, kv_blocks=100)
    held = replace(held, stages=stages_of(MODEL, "both", 0, 2)) if several else held
    asked = []

    def highest(*arguments):
        asked.append(arguments)
        return SimpleNamespace(schedule=replace(held, latency_bound_s=4.5))

    monkeypatch.setattr("xscheduler.highest_goodput.highest_goodput", highest)
    assert best_for_arrivals(SETTING, held) == (held, "")
    policies = tuple(name for name in POLICIES if not TRAITS[name].disaggregated)
    assert asked == [(SETTING, 5.0, ("orca",) if several else policies, {"replicas": 1}, False)]
    other = replace(held, stages=stages_of(MODEL, "both", 0, 3))
    monkeypatch.setattr("xscheduler.highest_goodput.highest_goodput", lambda *_: SimpleNamespace(schedule=other))
    found, why = best_for_arrivals(SETTING, held)
    assert found is None and why.endswith(f"needs 3 devices, but this run has {2 if several else 1}")


@pytest.mark.parametrize(("arrivals", "bound_s"), [(True, 5.0), (True, None), (False, 5.0)])
def test_a_process_searches_for_arrivals_where_requests_arrive_and_have_a_bound(monkeypatch, arrivals, bound_s):
    problem = reschedule.SearchInput(SETTING, replace(HELD, latency_bound_s=bound_s), 9, arrivals)
    written, names = [], []
    monkeypatch.setattr(reschedule, "read_problem", lambda kind: problem)
    monkeypatch.setattr(reschedule, "write_answer", written.append)
    monkeypatch.setattr(reschedule, "best", lambda *arguments: names.append(("best", *arguments)))
    monkeypatch.setattr(reschedule, "best_for_arrivals", lambda *arguments: names.append(("arrivals", *arguments)))
    reschedule.main()
    at_a_rate = arrivals and bound_s is not None
    assert names == [("arrivals", SETTING, problem.held) if at_a_rate else ("best", SETTING, problem.held, 9)]
    assert written == [None]
