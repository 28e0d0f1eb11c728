"""RRA's spaces: which N_D they hold, and that branch and bound is exact where throughput doesn't rise along them."""

import itertools
from dataclasses import make_dataclass, replace
from typing import Annotated

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.monotonicity import violations
from xcore.policies import TRAITS, Traits
from xcore.policies.control import Control
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.profile import Table
from xcore.specs.workload import LengthDistribution, Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler import ceilings
from xscheduler.search import search
from xscheduler.search_problem import Limits, SearchProblem
from xscheduler.spaces import at_value, spaces, twin
from xscheduler.spaces.chunked import FINE_TOKEN_BUDGETS, TOKEN_BUDGETS
from xscheduler.spaces.orca import FINE_PREFILLS, PREFILLS
from xscheduler.spaces.rra import iteration_counts
from xscheduler.spaces.waa import gpu_splits, memory_split, micro_batch_counts, own_splits, time_split
from xscheduler.tune import tune
from xsimulator.cost.cost_model import CostModel
from xsimulator.steady.load import Load

OPT = builtin_model("opt-13b")
A40 = parse_cluster("4xA40")


@given(st.integers(1, 10_000), st.floats(0.1, 1.0))
def test_no_n_d_that_matters_is_left_out(most, share):
    """Latency steps where the bound's length needs one phase more: the least N_D before each step is there."""
    length = max(1, int(most * share))
    counts = iteration_counts(LengthDistribution.fixed(most), length)
    assert list(counts) == sorted(set(counts), reverse=True)
    assert (counts[0], counts[-1]) == (most, 1)
    assert set(range(1, min(most, 64) + 1)) <= set(counts)
    assert len(counts) <= 64 + 2 * most // 64 + 200
    need = length - 1
    for n in range(64, need, 97):
        phases = -(-need // n)
        assert -(-need // phases) in counts
    assert all(a <= 1.05 * b + 1 for a, b in itertools.pairwise(counts))


def rra_spaces(tp, profile, limit, name, most=24):
    """RRA's space of a task on four A40, cut to an exhaustive search's patience."""
    fixed = {"replicas": 1, "tp_degree": tp, "tp_gpus": 4}
    problem = SearchProblem(
        CostModel(OPT, A40, profile, "fp16"), Load(task(name), False), Limits(latency_s=limit), fixed
    )
    found = spaces("rra", replace(problem, encode_micro_batches=(1,)))
    for space in found:
        space.variables = tuple(replace(v, values=tuple(n for n in v.values if n <= most)) for v in space.variables)
    return found


@pytest.mark.parametrize("limit", [20.0, 40.0])
def test_exact_on_a_pipeline_that_drains_between_phases(limit):
    """Four stages: at N_D = 1 the drain after every phase costs more than the smaller batches of N_D = 2 do."""
    profile = roofline_profile(OPT, A40)
    by_n_d = {space.variables[1].values: space for space in rra_spaces(1, profile, limit, "T")}
    apart = {tuple(range(24, stages, -1)) for stages in (3, 4)}  # of as many stages; phases that drain stand apart
    assert set(by_n_d) - {(n,) for n in range(1, 5)} == apart
    assert set(by_n_d) >= {(n,) for n in range(1, 5)}
    twice, once = (by_n_d[n,].simulate((24, n)).throughput for n in (2, 1))
    assert once < twice
    oracle = search(rra_spaces(1, profile, limit, "T"), "exhaustive")
    found = search(rra_spaces(1, profile, limit, "T"))
    assert found.throughput == oracle.throughput
    assert found.search.evaluations < 0.5 * found.search.space


def test_close_to_exact_on_measured_times_that_are_not_smooth():
    """Tables with 5 % of noise: throughput isn't monotone, and at least 99 % of the optimum's is still found."""
    rng = np.random.default_rng(0)
    smooth = roofline_profile(OPT, A40, overhead_s=5e-3)

    def noisy(table):
        return Table(table.axes, table.points, tuple(v * rng.uniform(0.95, 1.05) for v in table.values))

    degrees = [
        replace(
            d,
            decoder=replace(d.decoder, rest=noisy(d.decoder.rest), decode_attention=noisy(d.decoder.decode_attention)),
        )
        for d in smooth.degrees
    ]
    profile = replace(smooth, source="measured", degrees=tuple(degrees))
    (space,) = rra_spaces(4, profile, 5.0, "S")
    assert max(v.throughput for v in violations(space, 0.0)) > 0.0
    for limit in (1.5, 2.5, 5.0, 10.0):
        oracle = search(rra_spaces(4, profile, limit, "S"), "exhaustive")
        found = search(rra_spaces(4, profile, limit, "S"))
        assert oracle.space is not None
        assert found.throughput >= 0.99 * oracle.throughput


def problem(cluster="4xA40", workload=None, limits=None, **asked):
    cluster = parse_cluster(cluster)
    cost_model = CostModel(OPT, cluster, roofline_profile(OPT, cluster), "fp16")
    return SearchProblem(
        cost_model, Load(workload or task("S"), False), limits or Limits(), asked.pop("fixed", {}), **asked
    )


def declare(monkeypatch, kinds):
    """Register a policy with variables of these kinds."""
    variables = [(name, Annotated[int, kind]) for name, kind in kinds.items()]
    record = make_dataclass("OwnControl", variables, bases=(Control,), frozen=True, kw_only=True)
    monkeypatch.setitem(TRAITS, "own", Traits(name="own", what="", control=record))


def test_a_policy_that_only_declares_its_variables_is_tried_at_powers_of_two(monkeypatch):
    declare(monkeypatch, {"max_num_seqs": "residents", "decode_iterations": "period", "decode_batch": "target"})
    asked = problem(workload=Workload.fixed(100, 20))
    tried = {}
    for space in spaces("own", asked):
        assert space.size == 1
        tried.setdefault(len(space.where.replica.stages), set()).add(tuple(space.controls(space.values((0,))).items()))
    assert len(tried) == 4  # pipelines of one to four stages
    for found in tried.values():
        assert {name for controls in found for name, _ in controls} == {"max_num_seqs", "decode_iterations"}
        batches, periods = (
            {dict(controls)[name] for controls in found} for name in ("max_num_seqs", "decode_iterations")
        )
        assert periods == {1, 2, 4, 8, 16}
        assert batches == {2**i for i in range(len(batches))}
        assert len(found) == len(batches) * len(periods)


@pytest.mark.parametrize(
    ("stages", "counts"), [(1, (1,)), (3, (1, 2, 3)), (5, (1, 2, 3, 4, 5)), (7, (1, 2, 3, 4, 6, 7))]
)
def test_waa_cuts_decoding_into_as_many_micro_batches_as_stages_at_most(stages, counts):
    assert micro_batch_counts(stages) == counts


@pytest.mark.parametrize(("devices", "cluster"), [(2, "8xA40"), (5, "8xA40"), (8, "8xA40"), (16, "2x8xA40")])
def test_each_split_belongs_to_the_variant_whose_rule_is_nearer(devices, cluster):
    """And no split is lost: on up to eight devices all are searched, on more those around both rules' splits."""
    asked = problem(cluster)
    by_time, by_memory = time_split(asked, devices), memory_split(asked, devices)
    to_time, to_memory = (own_splits(policy, asked, devices) for policy in ("waa-c", "waa-m"))
    both = sorted(to_time + to_memory)
    assert both == gpu_splits(asked, devices, by_time, by_memory)
    assert devices > 8 or both == list(range(1, devices))
    assert all(abs(n - by_time) <= abs(n - by_memory) for n in to_time)
    assert all(abs(n - by_memory) < abs(n - by_time) for n in to_memory)


@pytest.mark.parametrize("cluster", ["2x8xA40", "4x8xA40"])
def test_waa_splits_many_devices_around_both_shares_of_encoding(cluster):
    """By computing time, and where the encoders' weights fill their devices; an eighth of all devices to each side."""
    asked = problem(cluster)
    devices, speed = asked.cost_model.cluster.devices, asked.speeds[1]
    usable = asked.cost_model.cluster.device.memory_bytes * asked.cost_model.cluster.memory_fraction
    shares = devices * speed.encode / (speed.encode + speed.decode), OPT.layers * OPT.layer_bytes(1, "fp16") / usable
    near, expected = max(1, devices // 8), set()
    for exact in shares:
        middle = min(max(1, round(exact)), devices - 1)
        expected |= {n for n in range(middle - near, middle + near + 1) if 1 <= n < devices}
    splits = time_split(asked, devices), memory_split(asked, devices)
    assert gpu_splits(asked, devices, *splits) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["S", "G"])
def test_waa_m_takes_the_split_whose_sides_differ_least_in_memory(name):
    """The oracle: the best schedule of every split."""
    cluster, workload = parse_cluster("4xA40"), task(name)
    profile, found = roofline_profile(OPT, cluster), {}
    for encoding in (1, 2, 3):
        fixed = {"replicas": 1, "encode_devices": encoding}
        best = tune(OPT, cluster, workload, profile, policies=("waa-c",), fixed=fixed)
        used = best.estimate.memory_bytes
        found[encoding] = abs(sum(used[:encoding]) / encoding - sum(used[encoding:]) / (4 - encoding))
    assert memory_split(problem(workload=workload), 4) == min(found, key=found.__getitem__)


def test_a_variant_without_a_split_is_the_other_ones_twin():
    """With two devices there is one split; a split that the user fixes is both variants'."""
    few, many = problem("2xA40"), problem("2x8xA40")
    assert own_splits("waa-m", few, 2) == [] and twin("waa-m", few) == "waa-c" and twin("waa-m", many) is None
    sizes = [[family.size for family in spaces(policy, few)] for policy in ("waa-c", "waa-m")]
    assert sizes[0] == sizes[1] != []
    fixed = problem("2x8xA40", fixed={"encode_devices": 3})
    assert own_splits("waa-c", fixed, 16) == own_splits("waa-m", fixed, 16) == [3]
    assert twin("waa-m", fixed) == "waa-c" and twin("waa-c", few) is None and twin("orca", few) is None


def test_waa_splits_memory_by_what_may_be_used_of_it():
    """Of half the memory the weights take twice the share; computing time doesn't depend on it."""
    asked = problem("2x8xA40")
    cluster = replace(asked.cost_model.cluster, memory_fraction=0.2)
    less = replace(asked, cost_model=CostModel(OPT, cluster, asked.cost_model.profile, "fp16"))
    exact = OPT.layers * OPT.layer_bytes(1, "fp16") / (cluster.device.memory_bytes * 0.2)
    assert exact > 1 and memory_split(less, 9) == pytest.approx(exact)
    assert time_split(asked, 9) == time_split(less, 9)


def test_prompts_an_iteration_double_and_for_an_open_system_rise_by_halves():
    assert tuple(2**i for i in range(8)) == PREFILLS
    assert set(PREFILLS[:5]) < set(FINE_PREFILLS) and FINE_PREFILLS[-1] == 16
    assert all(n & (n - 1) == 0 or (n % 3 == 0 and (n // 3) & (n // 3 - 1) == 0) for n in FINE_PREFILLS)
    assert all(a < b <= (2 if a == 1 else 1.5 * a) for a, b in itertools.pairwise(FINE_PREFILLS))
    found = spaces("orca", problem("1xA40"))
    most = found[0].variables[0].values[-1]
    assert PREFILLS[6] <= most < PREFILLS[7]  # no more prompts than sequences
    assert [space.name for space in found] == [f"orca-{number}" for number in range(7)]
    assert [space.constants["prefills_per_step"] for space in found] == list(PREFILLS[:7])
    (space,) = spaces("orca", problem("1xA40", open_system=True))
    assert space.variables[1].values == FINE_PREFILLS and space.variables[0] == found[0].variables[0]
    (space,) = spaces("orca", problem("1xA40", fixed={"prefills_per_step": 3, "max_num_seqs": 5}))
    assert space.constants["prefills_per_step"] == 3 and space.variables[0].values == (5,)


def test_token_budgets_double_and_rise_by_halves_where_prompts_are_long():
    """From 64 to 384 thousand; for an open system by an eighth of a power of two."""
    assert (TOKEN_BUDGETS[0], TOKEN_BUDGETS[-1]) == (64, 3 * 2**17) and len(TOKEN_BUDGETS) == 18
    assert all(b == 2 * a if b <= 2**14 else 1.3 < b / a <= 1.5 for a, b in itertools.pairwise(TOKEN_BUDGETS))
    assert (FINE_TOKEN_BUDGETS[0], FINE_TOKEN_BUDGETS[-1]) == (64, 2**18 - 2**14)
    assert all(16 * a <= 15 * b and 8 * b <= 9 * a for a, b in itertools.pairwise(FINE_TOKEN_BUDGETS))


@pytest.mark.parametrize("open_system", [False, True])
def test_token_budgets_leave_room_for_a_sequence_and_batches_stay_below_them(open_system):
    asked = problem("1xA40", open_system=open_system)
    found = spaces("chunked", asked)
    budgets = [space.constants["max_num_batched_tokens"] for space in found if not open_system]
    budgets = budgets or list(found[0].variables[1].values)
    known = FINE_TOKEN_BUDGETS if open_system else TOKEN_BUDGETS
    assert 5 < len(budgets) < len(known) and budgets == list(known[: len(budgets)])
    where, (most,) = found[0].where, {len(space.variables[0].values) for space in spaces("orca", problem("1xA40"))}
    need = where.load.resident_blocks("reserve").mean
    assert where.replica.room((float(budgets[-1]), 1)) >= need > where.replica.room((float(known[len(budgets)]), 1))
    for space in found:
        budget = max(budgets) if open_system else space.constants["max_num_batched_tokens"]
        assert space.variables[0].values == range(1, min(most, budget) + 1)
    (fixed, *_) = spaces("chunked", problem("1xA40", fixed={"max_num_batched_tokens": 10**7}))
    assert fixed.constants["max_num_batched_tokens"] == 10**7, "what is fixed is tried, and said not to fit"


@pytest.mark.parametrize("open_system", [False, True])
def test_no_token_budget_is_below_a_fixed_number_of_sequences(open_system):
    """vLLM refuses such a budget. The smallest one that is tried gives each sequence a token."""
    asked = problem("1xH100-SXM", open_system=open_system, fixed={"max_num_seqs": 300})
    found = spaces("chunked", asked)
    budgets = [space.constants["max_num_batched_tokens"] for space in found if not open_system]
    budgets = budgets or list(found[0].variables[1].values)
    assert budgets[0] == 300 and budgets == sorted(budgets)
    assert all(space.variables[0].values == (300,) for space in found)
    if not open_system:
        assert at_value(asked, found[0], 299) is None
        assert at_value(asked, found[0], 301)


@pytest.mark.parametrize("open_system", [False, True])
def test_a_fixed_budget_below_a_fixed_number_of_sequences_has_no_space(open_system):
    fixed = {"max_num_seqs": 300, "max_num_batched_tokens": 299}
    assert not spaces("chunked", problem("1xH100-SXM", open_system=open_system, fixed=fixed))


def test_more_sequences_than_any_budget_of_the_grid_get_their_own():
    (space,) = spaces("chunked", problem("1xH100-SXM", fixed={"max_num_seqs": 2 * TOKEN_BUDGETS[-1]}))
    assert space.constants["max_num_batched_tokens"] == 2 * TOKEN_BUDGETS[-1]


@pytest.mark.parametrize("admission", ["reserve", "grow"])
def test_no_batch_that_memory_might_hold_is_left_out(admission):
    """Of sequences of mean length: the last value is one that it does not."""
    asked = problem("1xA40", admission=(admission,))
    space = spaces("orca", asked)[0]
    fit = ceilings.residents_that_fit(space.where.replica, asked.load, admission)
    assert fit < space.variables[0].values[-1] <= 1.05 * fit + 2 and fit > 10


def test_hybrids_micro_batches_are_one_half_the_stages_and_as_many_as_stages():
    """Of encoding one, two or four times as many as stages; one where nothing overlaps."""
    found = {}
    for space in spaces("hybrid", problem("3xA40")):
        stages = len(space.where.replica.stages)
        found.setdefault(stages, []).append((space.constants["encode_micro_batches"], space.constants["micro_batches"]))
    two = list(itertools.product((2, 4, 8), (1, 2)))
    assert found == {1: [(1, 1)] * 2, 2: two, 3: list(itertools.product((3, 6, 12), (1, 2, 3)))}
    (space, *_) = spaces("hybrid", problem("1xA40", fixed={"encode_micro_batches": 7, "micro_batches": 5}))
    assert space.constants == {"encode_micro_batches": 7, "micro_batches": 5}


@pytest.mark.parametrize(("source", "rises"), [("roofline", True), ("measured", False)])
def test_measured_times_are_not_trusted_along_n_d(source, rises):
    asked = problem("1xA40")
    profile = replace(asked.cost_model.profile, source=source)
    asked = replace(asked, cost_model=CostModel(OPT, asked.cost_model.cluster, profile, "fp16"))
    (space,) = spaces("rra", asked)
    assert [v.throughput_rises for v in space.variables] == [True, rises]


def test_of_other_variables_that_a_policy_declares_few_values_are_tried(monkeypatch):
    declare(
        monkeypatch,
        {"prefills_per_step": "prompts", "max_num_batched_tokens": "tokens", "micro_batches": "micro-batches"},
    )
    found = spaces("own", problem("1xA40", workload=Workload.fixed(100, 20)))
    points = [space.controls(space.values((0,))) for space in found]
    assert {point["prefills_per_step"] for point in points} == {1, 2, 4, 8}
    assert {point["micro_batches"] for point in points} == {1}
    budgets = {point["max_num_batched_tokens"] for point in points}
    assert {64, 1024, 8192} <= budgets <= set(TOKEN_BUDGETS) and len(points) == 4 * len(budgets)


def test_no_budget_that_a_policy_declares_is_below_its_sequences(monkeypatch):
    declare(monkeypatch, {"max_num_seqs": "residents", "max_num_batched_tokens": "tokens"})
    found = spaces("own", problem("1xH100-SXM", workload=Workload.fixed(10, 20)))
    pairs = [space.controls(space.values((0,))) for space in found]
    assert max(pair["max_num_seqs"] for pair in pairs) > 64
    assert all(pair["max_num_seqs"] <= pair["max_num_batched_tokens"] for pair in pairs)


@pytest.mark.parametrize(
    ("fixed", "layouts"),
    [
        ({}, {(1, 0), (2, 2), (2, 4), (4, 4)}),
        ({"tp_degree": 2}, {(2, 2), (2, 4)}),
        ({"tp_degree": 2, "tp_gpus": 2}, {(2, 2)}),
        ({"tp_gpus": 4}, {(1, 0), (2, 4), (4, 4)}),
        ({"tp_degree": 1, "tp_gpus": 4}, {(1, 0)}),
    ],
)
def test_layouts_are_those_asked_for(fixed, layouts):
    asked = problem(fixed=fixed)
    assert {(one.degree, one.gpus) for one in asked.layouts(4, uniform=False)} == layouts
    assert {(one.degree, one.gpus) for one in asked.layouts(4, uniform=False, side="encode")} > layouts or not fixed


@pytest.mark.parametrize(("replicas", "sizes"), [(None, (1, 2, 3, 4)), (1, (3, 4)), (2, (2,)), (3, ())])
def test_replicas_can_be_fixed(replicas, sizes):
    assert problem(fixed={"replicas": replicas} if replicas else {}).replica_sizes() == sizes
