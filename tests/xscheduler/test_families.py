"""Branch and bound over all spaces of a policy, families of them too, against simulating every point."""

from dataclasses import replace

import pytest

from benchmarks.monotonicity import violations
from xcore.specs.bound import BoundMeaning
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import LengthDistribution, Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.search import search
from xscheduler.search_problem import Limits, SearchProblem
from xscheduler.space import Constraint, Evaluation, Family, Space, Variable, all_spaces, made_spaces
from xscheduler.spaces import POLICIES, grids, spaces
from xsimulator.cost.cost_model import CostModel
from xsimulator.steady.load import Load
from xsimulator.steady.outcome import latency, per_token, ttft

SCENARIOS = {
    "opt-13b": ("opt-13b", "2x2xA40", task("S")),
    "llama-3.1-8b": ("llama-3.1-8b", "2xA40", Workload.fixed(100, 40)),
    "t5-3b": ("t5-3b", "2xA40", task("S")),
}
WAA = ("waa-c", "waa-m")
CASES = [
    (name, policy, ("reserve",)) for name in SCENARIOS for policy in POLICIES if (name, policy) != ("t5-3b", "chunked")
]
CASES += [(name, policy, ("reserve", "grow")) for name in ("opt-13b", "llama-3.1-8b") for policy in ("orca", "chunked")]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that every point can be simulated."""
    monkeypatch.setattr(grids, "MOST", 8)


@pytest.fixture(scope="module")
def profiles():
    return {
        name: roofline_profile(builtin_model(model), parse_cluster(cluster), overhead_s=2e-3)
        for name, (model, cluster, _) in SCENARIOS.items()
    }


def members(name, policy, profiles, limits, admission=("reserve",)):
    model, cluster, workload = SCENARIOS[name]
    model, cluster = builtin_model(model), parse_cluster(cluster)
    cost_model = CostModel(model, cluster, profiles[name], "fp16", watched=False)
    load = Load(workload, model.encoder_layers > 0)
    fixed = {"decode_iterations": 7} if policy == "rra" and name != "llama-3.1-8b" else {}
    return spaces(policy, SearchProblem(cost_model, load, limits, fixed, variation=False, admission=admission))


def some_point(name, policy, profiles, admission):
    """A space and the values of a point in its midst, around which bounds are set."""
    made = all_spaces(members(name, policy, profiles, Limits(), admission))
    space = made[len(made) // 2]
    return space, space.values(tuple(at // 2 for at in space.highest))


BOUNDED = ("nothing", "latency", "ttft", "tpot", "resident")
LARGE = ("opt-13b", ("reserve", "grow"))
"""The spaces of both rules of admission on four devices are the largest: some bounds of theirs are slow."""


@pytest.mark.parametrize(
    ("name", "policy", "admission", "bounded"),
    [
        pytest.param(
            *case, bound, marks=pytest.mark.slow if (case[0], case[2]) == LARGE and bound in BOUNDED[2:] else ()
        )
        for case in CASES
        for bound in BOUNDED
    ],
)
def test_it_finds_the_optimum_of_all_spaces(name, policy, admission, bounded, profiles):
    space, values = some_point(name, policy, profiles, admission)
    where, outcome = space.where, space.outcome(values)
    limits = {
        "nothing": Limits(),
        "latency": Limits(latency_s=latency(where, outcome)),
        "ttft": Limits(ttft_s=ttft(where, outcome, 0.99)),
        "tpot": Limits(tpot_s=per_token(where, outcome).quantile(0.99)),
        "resident": Limits(resident=outcome.decode_batch),
    }[bounded]
    all_of_them, own, untried = (members(name, policy, profiles, limits, admission) for _ in range(3))
    points = sum(space.size for space in all_spaces(untried))
    oracle, found = search(all_of_them, "exhaustive"), search(own)
    assert oracle.search.space == found.search.space == points == oracle.search.evaluations
    assert found.search.evaluations == sum(len(space.known) for space in made_spaces(own)) <= points
    assert oracle.space is not None
    assert found.throughput == pytest.approx(oracle.throughput, rel=1e-6 if policy in WAA else 1e-12)
    assert found.space.meets(found.point)
    if bounded == "nothing" and policy not in WAA:  # so few batches of WAA are hardly worth skipping
        assert found.search.evaluations < 0.75 * points


def test_a_family_is_made_only_when_its_ceiling_is_the_best_bound_left():
    def line(throughput, ceiling):
        return Space(
            "line",
            (Variable("x", (1, 2)),),
            (Constraint("memory", 1.0, (True,)),),
            lambda at: Evaluation(throughput * at[0], (0.0,)),
            ceiling,
        )

    good, poor = Family("good", 9.0, 4, lambda: [line(2, 5.0), line(4, 9.0)]), Family("poor", 7.0, 2, lambda: 1 / 0)
    found = search([poor, good])
    assert (found.throughput, found.search.space) == (8, 6)
    assert poor.made is None
    assert found.search.evaluations == 2  # the corners of one: the space of the lower ceiling is not looked at


@pytest.mark.parametrize(("name", "policy", "admission"), [case for case in CASES if case[0] != "opt-13b"])
def test_figures_rise_along_every_variable_as_is_declared(name, policy, admission, profiles):
    """But for steps of a percent or two: a prompt waits less for its first token where iterations are more alike. Equal
    requests on one stage stay in step, and wait for one another by how their prompts fill iterations: up and down.
    """
    made = all_spaces(members(name, policy, profiles, Limits(1e9, 1e9, 1e9), admission))
    for space in (made[0], made[len(made) // 2], made[-1]):
        if len(space.variables) > 1:  # every n-th N_D
            space.variables = tuple(
                replace(v, values=v.values[:: max(1, len(v.values) // 12)]) for v in space.variables
            )
        for along in violations(space, 0.02):
            assert along.throughput <= 0.06
            for constraint, share in zip(space.constraints, along.figures, strict=True):
                most = 0.15 if constraint.name == "ttft" else 0.06
                assert share <= most, (constraint.name, along.variable)


def geometric(mean, longest):
    """Outputs of which few are long."""
    lengths = tuple(range(1, longest + 1))
    weights = [(1 - 1 / mean) ** length for length in lengths]
    return LengthDistribution(lengths, tuple(weight / sum(weights) for weight in weights))


SHORT = LengthDistribution((1, 2), (0.9, 0.1))
"""Outputs most of which end with prefill."""
MIXED = LengthDistribution((8, 200), (0.9, 0.1))


@pytest.mark.parametrize("loosened", [1.0005, pytest.param(1.1, marks=pytest.mark.slow), 1.4])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("outputs", "percentile"), [(SHORT, 99.9), (geometric(30, 120), 50.0), (geometric(30, 120), 99.9), (MIXED, 99.0)]
)
def test_rra_has_its_optimum_under_a_bound_that_few_schedules_meet(outputs, percentile, replicas, loosened, profiles):
    """Few prompts are then encoded together, and many iterations have no sequence and are skipped; a percentile lies
    on either side of a phase's end.
    """
    model, cluster, tables = builtin_model("llama-3.1-8b"), parse_cluster("2xA40"), profiles["llama-3.1-8b"]
    cost_model = CostModel(model, cluster, tables, "fp16", watched=False)
    load = Load(Workload("short", LengthDistribution.fixed(1000), outputs, 1), False)

    def asked(latency_s):
        limits, bound = Limits(latency_s=latency_s), BoundMeaning("requests", percentile)
        return spaces(
            "rra", SearchProblem(cost_model, load, limits, {"tp_degree": 1, "replicas": replicas}, bound=bound)
        )

    quickest = min(space.at(space.lowest).figures[2] for space in asked(1.0))
    oracle, found = (search(asked(quickest * loosened), method) for method in ("exhaustive", "bnb"))
    assert oracle.throughput > 0
    assert found.throughput == oracle.throughput
