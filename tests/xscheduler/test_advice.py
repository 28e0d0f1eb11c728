"""Explanations: every figure in a sentence is one of the estimates', and nothing is said that they don't show."""

import functools
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.xcore.small_specs import profile, schedule
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Stage
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.advice import decoding, looser_bound, other_cluster, twice, use_of, why_behind
from xscheduler.search import Search
from xscheduler.ties import TIE
from xscheduler.tune import tune
from xscheduler.tuned import Tuned
from xsimulator.replay.event_simulator import replay

OPT = builtin_model("opt-13b")
A40 = parse_cluster("4xA40")


@functools.cache
def answer(bound_s=12.0, cluster="4xA40", floor=None):
    where = parse_cluster(cluster)
    policies = ("static", "orca", "chunked", "rra")
    asked = {"latency_bound_s": bound_s, "policies": policies, "floor": floor}
    return tune(OPT, where, task("S"), roofline_profile(OPT, where), **asked)


def estimate(tokens=100.0, sequences=10.0, tpot=0.02, busy=0.9):
    return Estimate(sequences, tokens, 1.0, 1.0, 1.0, 0.1, tpot, 0.1, tpot, memory_bytes=(2e10,), utilisation=(busy,))


def test_decoding_sequences_are_littles_law():
    # 90 tokens a second after the first ones, 20 ms each
    assert decoding(estimate()) == pytest.approx(1.8)
    assert decoding(estimate(tpot=None)) is None


@pytest.mark.parametrize("policy", ["static", "chunked", "rra"])
def test_decoding_sequences_are_those_of_a_run(policy):
    """The time that requests spend between their first and last tokens, over the run's."""
    found = next(a.schedule for a in answer().alternatives if a.policy == policy)
    run = replay(found, roofline_profile(OPT, A40), task("S").draw(1500, seed=2), timeline=False)
    counted = sum(s.finish_s - s.first_token_s for s in run.served) / run.seconds
    assert decoding(run.estimate) == pytest.approx(counted, rel=0.08)


figures = st.builds(
    estimate,
    tokens=st.floats(20, 1e4),
    sequences=st.floats(1, 19),
    tpot=st.one_of(st.none(), st.floats(1e-4, 1.0)),
    busy=st.floats(0, 1),
)


@given(figures, figures)
def test_only_differences_that_cost_something_are_named(best, other):
    said = "; ".join(why_behind((schedule("chunked"), best), (schedule("orca"), other)))
    many, most = decoding(other), decoding(best)
    differences = [best.utilisation[0] - other.utilisation[0]]
    if many and most:
        differences += [1 - many / most, other.tpot_s / best.tpot_s - 1]
    assume(all(abs(d - 0.02) > 1e-9 for d in differences))  # there, rounding decides
    fewer = re.search(r"\((\d+)% fewer\)", said)
    assert bool(fewer) == bool(many and most and 1 - many / most > 0.02)
    if fewer:
        assert int(fewer[1]) == pytest.approx(100 * (1 - many / most), abs=0.51)
    slower = re.search(r"\((\d+% more|[\d.,]+ times as much)\)", said)
    assert bool(slower) == bool(many and most and other.tpot_s / best.tpot_s - 1 > 0.02)
    assert ("idle" in said) == (best.utilisation[0] - other.utilisation[0] > 0.02)


def test_the_greatest_difference_is_named_first():
    """Twice the seconds a token, a third fewer sequences at a time, a tenth more idle."""
    best, other = estimate(tokens=1000.0, sequences=100.0), estimate(310.0, 10.0, tpot=0.04, busy=0.8)
    assert why_behind((schedule("orca"), best), (schedule("orca"), other)) == [
        "a token takes 40 ms instead of 20 ms in the best (2 times as much)",
        "about 12 sequences are decoded at a time instead of 18 in the best (33% fewer)",
        "devices are idle 20% of the time instead of 10% in the best",
    ]


def test_without_utilisation_nothing_is_said_of_idle_devices():
    busy, unknown = estimate(busy=0.5), replace(estimate(), utilisation=())
    for best, other in ((busy, unknown), (unknown, busy), (unknown, unknown)):
        assert why_behind((schedule("orca"), best), (schedule("orca"), other)) == []
    assert "busy" not in use_of((schedule("orca"), unknown))


WAA = (Stage((0,), 1, "encode", None, (0, 12)), Stage((1,), 1, "decode", None, (0, 12)))


def test_what_follows_from_a_policy_is_said_of_that_policy_alone():
    def made(policy):
        return schedule(policy, **({"stages": WAA} if policy.startswith("waa") else {}))

    def said(best, other):
        return "; ".join(why_behind((made(best), estimate()), (made(other), estimate())))

    assert "the best schedule reads them once" in said("chunked", "rra")
    assert "the best schedule reads them once" not in said("rra", "static")
    assert all("the best schedule reads them once" not in said("chunked", other) for other in ("orca", "waa-c"))
    assert "stored twice" in said("rra", "waa-c") and "stored twice" not in said("waa-m", "waa-c")
    assert "a batch runs until its longest output ends, 45.6 tokens, although the mean output has 32" in said(
        "rra", "static"
    )
    assert "until its longest output" not in said("static", "hybrid")
    alike = {"workload": Workload.fixed(9, 9)}
    t5 = builtin_model("t5-3b")  # two stacks: an encoder's weights aren't a decoder's
    for other in ("rra", "waa-c"):
        stages = {"stages": WAA} if other == "waa-c" else {}
        assert why_behind((schedule("orca", t5), estimate()), (schedule(other, t5, **stages), estimate())) == []
    assert why_behind((schedule("rra"), estimate()), (schedule("static", **alike), estimate())) == []


def test_every_policy_is_placed_beside_the_best():
    found = answer()
    best = next(a for a in found.alternatives if a.schedule == found.schedule)  # by a tie perhaps not the fastest
    shares = {
        one.policy: one.estimate.throughput_tok_s / best.estimate.throughput_tok_s
        for one in found.alternatives
        if one is not best
    }
    for one in found.alternatives:
        assert f"limited by {one.estimate.binding}" in one.reason
        if one is not best:
            share = shares[one.policy]
            behind = f"{100 * share:.3g}% of {best.policy}'s throughput: "
            assert one.reason.startswith(behind if share < 1 - TIE else f"equal to {best.policy}")
    following = max(shares, key=shares.get)
    if shares[following] >= 1 - TIE:
        assert best.reason.startswith(f"the best; {following} is equally good; ")
        return
    said = re.match(rf"the best; the next policy, {following}, reaches ([\d.]+)% of its throughput; ", best.reason)
    assert float(said[1]) == pytest.approx(100 * shares[following], rel=5e-3)  # one measure for both sides


def test_a_batch_too_wide_says_for_what():
    """Either the measured profile's largest batch, or what was allowed: with both numbers and the way out."""
    fixed = {"encode_batch": 8}
    device = parse_cluster("1xA40")
    narrow = profile(builtin_model("gpt2"))
    points = ((1.0, 4.0), (1.0, 1024.0))
    layer = replace(
        narrow.degrees[0].decoder, decode_attention=replace(narrow.degrees[0].decoder.decode_attention, points=points)
    )
    narrow = replace(narrow, degrees=(replace(narrow.degrees[0], decoder=layer),))
    model, given = builtin_model("gpt2"), {"policies": ("static",), "fixed": fixed}
    said = tune(model, device, task("T"), narrow, **given).alternatives[0].reason
    assert said.endswith(
        "decode 8 sequences at a time, and the profile was measured with at most 4: --profile roofline also covers more"
    )
    said = tune(model, device, task("T"), narrow, most_resident=3, **given).alternatives[0].reason
    way = "at most 3 are allowed: pass more requests, or fix the batch with an option"
    assert said == f"even its smallest batch would decode 8 sequences at a time, and {way}"


def tuned(tokens, policy="orca", cluster=A40):
    """The answer of a search with so many tokens a second; none where that is None."""
    cost = Search("bnb", 1, 1, 0.0)
    if tokens is None:
        return Tuned(None, None, (), cost, None, ())
    return Tuned(schedule(policy, cluster=cluster), estimate(tokens), (), cost, None, ())


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (100.0, 150.0, "{asked} would give at least 50% more throughput, with rra"),
        (100.0, 100.05, "no better schedule was found for {asked}"),
        (100.0, 99.0, "no better schedule was found for {asked}"),
        (100.0, None, "no better schedule was found for {asked}"),
        (None, 150.0, "{asked} would give 150 tokens/s with policy rra"),
        (None, None, "{asked} would not be enough"),
    ],
)
def test_what_a_looser_bound_gives_is_said(before, after, said):
    def again(bound_s, cluster, floor):
        assert (bound_s, cluster, floor) == (3.0, A40, before or 0.0)
        return tuned(after, "rra")

    assert looser_bound(again, tuned(before), 2.0, A40) == said.format(asked="a bound of 3s instead of 2s")


@pytest.mark.parametrize(
    ("before", "after", "cluster", "said"),
    [
        (
            100.0,
            300.0,
            "8xA40",
            "would give at least 3.00 times the throughput, 1.50 times per device: 300 tokens/s with rra",
        ),
        (100.0, 300.0, "4xA100-80GB", "would give at least 3.00 times the throughput: 300 tokens/s with rra"),
        (
            100.0,
            None,
            "8xA40",
            "would give at least 2.00 times the throughput, 1.00 times per device: 200 tokens/s with orca",
        ),
        (100.0, None, "4xA100-80GB", "would not be enough"),
        (None, 300.0, "8xA40", "would give 300 tokens/s with rra"),
    ],
)
def test_what_another_cluster_gives_is_said(before, after, cluster, said):
    there = parse_cluster(cluster)

    def again(bound_s, cluster, floor):
        assert (bound_s, cluster, floor) == (2.0, there, 200.0 if before and cluster.devices == 8 else 0.0)
        return tuned(after, "rra", there)

    assert other_cluster(again, tuned(before), 2.0, there, "asked") == f"{cluster} (asked) {said}"


@pytest.mark.parametrize(
    ("once", "doubled"),
    [
        ("1xA40", "2xA40"),
        ("4xA40", "8xA40"),
        ("5xA40", "2x5xA40"),
        ("8xA40", "2x8xA40"),
        ("2x2xA40", "4x2xA40"),
        ("3x8xA40", "6x8xA40"),
    ],
)
def test_twice_the_devices_are_in_the_node_as_far_as_eight(once, doubled):
    larger = twice(parse_cluster(once))
    assert larger.name == doubled
    assert larger.devices == 2 * parse_cluster(once).devices == parse_cluster(doubled).devices


@pytest.mark.slow
def test_looser_bounds_and_larger_clusters_are_searched_anew():
    def again(bound_s, cluster, floor):
        return answer(bound_s, cluster.name, floor)

    found = answer()
    gain = answer(18.0).estimate.throughput_tok_s / found.estimate.throughput_tok_s - 1
    said = looser_bound(again, found, 12.0, A40)
    assert "a bound of 18s instead of 12s" in said
    assert ("no better" in said) == (gain < 0.005)
    assert "no better" in said or f"would give at least {gain:.0%} more throughput" in said
    assert looser_bound(again, found, None, A40) is None
    double = twice(A40)
    assert double.name == "8xA40" and double.devices == 8
    times = answer(12.0, "8xA40").estimate.throughput_tok_s / found.estimate.throughput_tok_s
    assert f"{times:.2f} times the throughput" in other_cluster(again, found, 12.0, double, "twice the devices")
    assert twice(parse_cluster("2x8xA40")).name == "4x8xA40"
    assert looser_bound(again, answer(0.01), 0.01, A40).endswith("would not be enough")


@pytest.mark.parametrize("bound_s", [12.0, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_search_above_a_floor_finds_the_same_or_nothing(bound_s):
    reached = answer(bound_s).estimate.throughput_tok_s
    for floor in (0.0, 0.5 * reached, 0.98 * reached):
        assert answer(bound_s, floor=floor).estimate.throughput_tok_s == pytest.approx(reached, rel=2 * TIE)
    assert answer(bound_s, floor=1.01 * reached).schedule is None


def test_use_tells_the_figures():
    a = answer()
    said = use_of((a.schedule, a.estimate))
    assert f"busy {sum(a.estimate.utilisation) / 4:.0%}" in said
    filled = max(a.estimate.memory_bytes) / (A40.device.memory_bytes * A40.memory_fraction)
    assert f"{filled:.0%} of the usable memory" in said and filled <= 1.0
    assert f"about {decoding(a.estimate):.3g} sequences" in said


def test_outputs_of_one_token_are_explained_too():
    found = tune(OPT, A40, Workload.fixed(100, 1), roofline_profile(OPT, A40), policies=("static", "orca", "rra"))
    assert all(a.reason for a in found.alternatives) and found.estimate.tpot_s is None
