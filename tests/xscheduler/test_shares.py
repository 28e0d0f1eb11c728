"""Shares of a point's limits, found without its times, are those of its evaluation."""

import pytest

from tests.xscheduler.test_ceilings import evenly, spaces_of
from xcore.specs.workload import Workload, task
from xscheduler.candidates import CandidateFamily
from xscheduler.search_problem import Limits

SETTINGS = (
    ("opt-13b", "4xA40", task("S"), 0.0),
    ("opt-6.7b", "2xA40", Workload.fixed(512, 64), 0.0),
    ("opt-6.7b", "4xA40", Workload.fixed(700, 1), 0.0),
    ("t5-11b", "2xA40", task("T"), 0.0),
)


def points(space):
    """Corners, and a point between them."""
    middle = tuple((low + high) // 2 for low, high in zip(space.lowest, space.highest, strict=True))
    return {space.lowest, space.highest, middle}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting[0]}-{setting[2].name}")
@pytest.mark.parametrize("policy", ["rra", "waa-c", "waa-m", "orca", "chunked", "static", "hybrid"])
def test_shares_are_those_of_the_evaluation(policy, setting):
    if policy == "chunked" and setting[0] == "t5-11b":
        return
    members = evenly(spaces_of(*setting, Limits(), policy), 10)
    for space in [m.spaces[len(m.spaces) // 2] if isinstance(m, CandidateFamily) else m for m in members]:
        for point in points(space):
            values = space.values(point)
            assert space.shares_of(values) == space.simulate(values).figures[:2]
            by_outcome = policy.startswith("waa") or bool(space.constants.get("grows"))
            assert (values in space.sizes) == by_outcome
            space.size_of(values)
            assert space.shares_of(values) == space.sizes[values].shares
