"""Ceilings: no point of any space gives more than its ceiling or is quicker than its quickest latency."""

import itertools
import math

import numpy as np
import pytest

from tests.xcore import small_specs
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.candidates import CandidateFamily
from xscheduler.ceilings import Interleaved, Reach, decode_rate, reach
from xscheduler.search_problem import Limits, SearchProblem
from xscheduler.spaces import POLICIES, spaces
from xsimulator.cost.cost_model import CostModel, ReplicaCost
from xsimulator.steady.load import Load
from xsimulator.steady.outcome import latency, memory_share

SCENARIOS = [
    ("opt-13b", "4xA40", task("S"), 0.0, None),
    ("opt-13b", "2x2xA40", task("T"), 5e-3, 12.0),
    ("llama-3.1-8b", "3xA40", task("C1"), 0.0, 3.0),
    ("llama-3.1-8b", "2xA40", Workload.fixed(900, 2), 2e-3, None),
    ("opt-13b", "4xA40", Workload.fixed(8, 200), 2e-2, 20.0),
    ("t5-3b", "2xA40", Workload.fixed(8, 2), 2e-2, None),  # large batches of short prompts
    ("t5-3b", "3xA40", task("S"), 2e-3, 6.0),
    ("gpt3-39b", "8xA100-80GB", Workload.fixed(100, 1), 2e-2, None),  # nobody decodes
    ("gpt3-39b", "8xA100-80GB", task("G"), 0.0, 30.0),
]
MOST_SPACES = 6
"""Spaces of a policy that are looked at, spread evenly over all of them."""


def evenly(items, most):
    """Up to `most` of the items, the first and the last among them."""
    places = {round(i * (len(items) - 1) / (most - 1)) for i in range(most)}
    return [items[i] for i in sorted(places)]


def thinned(values, most=7):
    """A few values, denser at the small ones."""
    return [values[i] for i in sorted({round((len(values) - 1) * (k / (most - 1)) ** 2) for k in range(most)})]


def spaces_of(model, cluster, workload, overhead_s, limits, policy, partial=True, admission=("reserve", "grow")):
    model, cluster = builtin_model(model), parse_cluster(cluster)
    profile = roofline_profile(model, cluster, overhead_s=overhead_s)
    cost_model = CostModel(model, cluster, profile, "fp16", watched=False)
    load = Load(workload, model.encoder_layers > 0)
    return spaces(
        policy, SearchProblem(cost_model, load, limits, {}, variation=False, partial=partial, admission=admission)
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: f"{s[0]}-{s[1]}-{s[2].name}")
def test_no_point_exceeds_them(scenario, policy):
    *given, bound_s = scenario
    highest, quickest, looked_at = 0.0, math.inf, 0
    for member in evenly(spaces_of(*given, Limits(latency_s=bound_s), policy) or [None], MOST_SPACES):
        if member is None:
            return  # not a policy for this model
        inside = [member]
        if isinstance(member, CandidateFamily):
            inside = evenly(member.spaces, 2)
            assert member.size == sum(space.size for space in member.spaces)
            assert all(space.ceiling <= member.ceiling * (1 + 1e-9) for space in member.spaces)
            assert all(space.quickest_s >= member.quickest_s * (1 - 1e-9) for space in member.spaces)
        for space in inside:
            for values in itertools.product(*(thinned(v.values) for v in space.variables)):
                found, outcome = space.simulate(values), space.outcome(values)
                if memory_share(space.where, outcome) > 1:
                    continue
                looked_at += 1
                quickest = min(quickest, latency(space.where, outcome) / space.quickest_s)
                if meets(space, values):
                    highest = max(highest, found.throughput / space.ceiling if space.ceiling else math.inf)
    assert looked_at
    assert highest <= 1.0
    assert quickest >= 1.0


@pytest.mark.parametrize("policy", ["static", "rra"])
def test_without_a_bound_they_are_near_what_is_reached(policy):
    """One that is far too high would have every space searched."""
    for space in spaces_of("opt-13b", "4xA40", task("S"), 0.0, Limits(), policy):
        points = itertools.product(*(thinned(v.values, 12) for v in space.variables))
        reached = max(found.throughput for found in map(space.simulate, points) if found.figures[0] <= 1)
        assert space.ceiling < 2.5 * reached


NEAR = {"static": 1.65, "hybrid": 1.65, "orca": 1.9, "chunked": 1.9, "rra": 1.1, "waa-c": 1.1, "waa-m": 1.1}
"""Ceilings over what is reached, where that is least: policies of batches drain, and the count knows no bubbles."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("model", "cluster", "bound_s"), [("opt-13b", "4xA40", 12.0), ("t5-3b", "2xA40", None)])
def test_on_some_layout_they_are_near_what_is_reached(model, cluster, bound_s, policy):
    """Throughput under the bound, and with none but the memory the latency, which only the margin parts."""
    shares, quickness = [math.inf], [math.inf]
    members = spaces_of(model, cluster, task("S"), 0.0, Limits(latency_s=bound_s), policy)
    for member in evenly(members, MOST_SPACES) if members else []:
        for space in evenly(member.spaces, 2) if isinstance(member, CandidateFamily) else [member]:
            points = list(itertools.product(*(thinned(v.values, 12) for v in space.variables)))
            meeting = [space.simulate(values).throughput for values in points if meets(space, values)]
            shares += [space.ceiling / max(meeting)] if meeting else []
            lowest = tuple(v.values[0] for v in space.variables)
            quickness.append(latency(space.where, space.with_least_memory(lowest)) / space.quickest_s)
    if members:
        assert min(shares) < NEAR[policy]
        assert min(quickness) < (1.5 if policy.startswith("waa") else 1.12)


def meets(space, values):
    figures = space.simulate(values).figures
    return all(f <= c.limit for f, c in zip(figures, space.constraints, strict=True))


@pytest.mark.parametrize(
    ("budget", "batch", "iteration"), [(1.5, 4, 1.8), (1.0, 2, 1.5), (9.0, 8, 2.0), (None, 8, 2.0)]
)
def test_decoding_is_bounded_by_the_first_batch_that_comes_too_late(budget, batch, iteration):
    """The largest batch in time lies before it. Queries of ten iterations, the longest of one."""
    reached = Reach(np.array([1.0, 2.0, 4.0, 8.0]), np.array([1.0, 1.5, 1.8, 2.0]), np.full(4, 1e-3))
    assert decode_rate(reached, 10, 1, budget) == pytest.approx(batch / iteration / 10)
    assert decode_rate(reached, 10, 1, 0.5) == 0.0


@pytest.mark.parametrize("residents", [1.0, 100.0, 8192.0, 10_000.0])
def test_decoding_is_looked_at_up_to_the_residents_in_even_steps(residents):
    """Steps of a quarter to the next whole number, up to 8,192; no batch twice, and none that doesn't fit."""
    found = reach(ReplicaCost.of(small_specs.schedule(), small_specs.profile()).decode, 100.0, residents)
    assert (found.batch[0], found.batch[-1]) == (1.0, residents)
    steps = found.batch[1:] / found.batch[:-1]
    assert all(1.1 < step <= 2.0 for step in steps[:-1]) and all(1.0 < step <= 2.0 for step in steps[-1:])
    assert residents != 8192.0 or steps[-1] > 1.2


def test_nothing_is_served_within_a_time_in_which_no_prompt_is():
    """The rate of iterations with prompts between them, under no time at all and under much of it."""
    reached = Reach(np.array([1.0, 2.0, 4.0, 8.0]), np.array([1.0, 1.5, 1.8, 2.0]), np.full(4, 1e-3))
    load = Load(task("S"), False)
    between = Interleaved.of(load, float(load.iterations[0][-1]), 1)
    assert between.rate(reached, 10.0, 10.0, 1e-6, 0.1) == 0.0 < between.rate(reached, 10.0, 10.0, 1e6, 0.1)


@pytest.mark.parametrize("stages", [1, 3])
def test_queries_of_one_length_are_all_there_in_all_iterations_of_the_longest(stages):
    """No query ends before the longest, so that the least and the most residents are the prompts."""
    load = Load(Workload.fixed(64, 40), False)
    between = Interleaved.of(load, float(load.iterations[0].max()), stages)
    assert between.least == pytest.approx(between.prompts) and between.most == pytest.approx(between.prompts)


def test_residents_of_several_lengths_lie_between_one_and_the_prompts():
    load = Load(task("S"), False)
    between = Interleaved.of(load, float(load.iterations[0].max()), 1)
    assert (between.least > 0).all() and (between.least < between.prompts).all()
    assert (between.most >= between.least * (1 - 1e-9)).all() and (between.most <= between.prompts * (1 + 1e-9)).all()
