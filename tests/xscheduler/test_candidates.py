"""Candidates: a point's figures, and the schedule that is made of it."""

import pytest

from tests.xscheduler.test_ceilings import evenly, spaces_of
from xcore.specs.workload import task
from xscheduler.candidates import CandidateFamily, schedule
from xscheduler.search_problem import Limits
from xscheduler.space import all_spaces

SETTING = ("opt-13b", "4xA40", task("S"), 0.0)


def some_spaces(policy, limits, most=12):
    """Spaces of a policy, spread evenly over all of them."""
    members = evenly(spaces_of(*SETTING, limits, policy), most)
    return [m.spaces[len(m.spaces) // 2] if isinstance(m, CandidateFamily) else m for m in members]


@pytest.mark.parametrize("policy", ["rra", "waa-c", "orca"])
def test_a_schedule_says_what_its_stages_are(policy):
    """Of each side, the degree of its groups and the devices in them; as many replicas as there is room for."""
    limits, degrees = Limits(latency_s=30.0), set()
    for space in some_spaces(policy, limits):
        values = space.values(space.lowest)
        made, outcome = schedule(space, values, limits), space.outcome(values)
        assert made.replicas * sum(len(stage.devices) for stage in made.stages) + made.idle == 4
        assert made.idle < sum(len(stage.devices) for stage in made.stages)
        assert (made.kv_blocks, made.latency_bound_s) == (outcome.demand.blocks, 30.0)
        written = made.tensor_parallelism
        for side, degree, gpus in (
            ("decode", written["tp_degree"], written["tp_gpus"]),
            ("encode", written["encode_tp_degree"], written["encode_tp_gpus"]),
        ):
            own = [s for s in made.stages if s.phase in ("both", side)]
            grouped = sum(len(s.devices) for s in own if s.tp > 1)
            expected = (max(s.tp for s in own), grouped)
            degrees.add(expected)
            assert (degree, gpus) == (expected if side == "decode" or policy == "waa-c" else (None, None))
        assert made.control.of_kind("target") == (None if policy == "orca" else outcome.decode_batch)
        for variable, value in zip(space.variables, values, strict=True):
            assert getattr(made.control, variable.name) == value
    assert len(degrees) > 1


@pytest.mark.parametrize("resident", [None, 3])
def test_a_batch_is_as_wide_as_its_share_of_what_was_asked(resident):
    (space, *_) = some_spaces("static", Limits(resident=resident))
    for batch in (1, 3, 4):
        assert space.simulate((batch,)).figures[1] == (batch / resident if resident else 0.0)


@pytest.mark.parametrize("policy", ["rra", "waa-c", "waa-m", "orca", "chunked", "static", "hybrid"])
@pytest.mark.parametrize("bound_s", [None, 3.0])
def test_a_points_size_is_that_of_its_evaluation_and_of_its_schedule(policy, bound_s):
    limits = Limits(bound_s)
    for space in some_spaces(policy, limits):
        for point in {space.lowest, space.highest}:
            values = space.values(point)
            size, evaluated, outcome = space.measure(values), space.simulate(values), space.outcome(values)
            assert size.throughput == max(evaluated.throughput, evaluated.best_below)
            assert size.shares == evaluated.figures[:2]
            assert (size.blocks, size.decode_batch) == (outcome.demand.blocks, outcome.decode_batch)


def test_throughput_counts_the_clusters_tokens():
    for space in all_spaces(some_spaces("static", Limits())):
        values = space.values(space.lowest)
        found, outcome = space.simulate(values), space.outcome(values)
        assert found.throughput == pytest.approx(space.estimate(values).throughput_tok_s)
        assert found.throughput == pytest.approx(outcome.throughput * space.where.replicas * task("S").output.mean)
