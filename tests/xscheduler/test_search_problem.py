"""Questions: the constraints in their order, what is the widest batch, and what the ceilings count."""

from types import SimpleNamespace

import pytest

from tests.xcore.small_specs import MODEL, profile
from xcore.specs.bound import PAPER_BOUND, BoundMeaning
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import LengthDistribution, Workload
from xprofiler.roofline import roofline_profile
from xscheduler import search_problem
from xscheduler.ceilings import MARGIN
from xscheduler.search_problem import Limits, SearchProblem
from xsimulator.cost.cost_model import CostModel
from xsimulator.steady.load import Load
from xsimulator.steady.times import Times

FIXED = Workload.fixed(20, 10)
FOUR = parse_cluster("4xA40")


def asked(limits=None, tables=None, workload=FIXED, encoder_decoder=False, **how):
    cost_model = CostModel(MODEL, FOUR, tables or profile(), "fp32")
    return SearchProblem(cost_model, Load(workload, encoder_decoder), limits or Limits(), {}, **how)


def test_constraints_are_in_one_order_and_only_those_that_were_asked_for():
    every = Limits(2.0, ttft_s=0.5, tpot_s=0.1).constraints(2)
    assert [(c.name, c.limit, c.rises) for c in every] == [
        (name, limit, (True, True))
        for name, limit in (("memory", 1.0), ("resident", 1.0), ("latency", 2.0), ("ttft", 0.5), ("tpot", 0.1))
    ]
    assert [(c.name, c.rises) for c in Limits().constraints(1, "measured")] == [
        ("memory", (True,)),
        ("measured", (True,)),
    ]


def test_figures_are_those_of_the_constraints(monkeypatch):
    monkeypatch.setattr(search_problem, "latency", lambda scenario, outcome: 1.0)
    monkeypatch.setattr(search_problem, "ttft", lambda scenario, outcome, share: 0.3 * share)
    monkeypatch.setattr(search_problem, "per_token", lambda scenario, outcome: Times.normal(0.05))
    where = SimpleNamespace(bound=BoundMeaning(percentile=90.0))
    assert Limits(9.0, 9.0, 9.0).figures(where, None) == pytest.approx((1.0, 0.27, 0.05), rel=1e-5)
    assert Limits(ttft_s=9.0).figures(where, None) == pytest.approx((0.27,))
    monkeypatch.setattr(search_problem, "per_token", lambda scenario, outcome: None)
    assert Limits(tpot_s=9.0).figures(where, None) == (0.0,), "nobody decodes"


@pytest.mark.parametrize(("blocks", "share"), [(None, 0.5), (100, 0.5), (40, 0.75)])
def test_memory_is_the_devices_or_a_given_caches(blocks, share, monkeypatch):
    monkeypatch.setattr(search_problem, "memory_share", lambda scenario, outcome: 0.5)
    assert Limits(kv_blocks=blocks).memory(None, SimpleNamespace(demand=SimpleNamespace(blocks=30))) == share


@pytest.mark.parametrize(
    ("resident", "measured", "roofline"),
    [
        (None, ("measured", 1024), ("resident", None)),
        (20, ("resident", 20), ("resident", 20)),
        (1024, ("resident", 1024), ("resident", 1024)),
        (2000, ("measured", 1024), ("resident", 2000)),
    ],
)
def test_the_widest_batch_is_what_was_asked_or_measured(resident, measured, roofline):
    limits = Limits(resident=resident)
    assert asked(limits).widest == measured
    assert asked(limits, roofline_profile(MODEL, FOUR)).widest == roofline


def test_a_policy_has_the_rules_of_admission_that_its_steady_state_knows():
    both = asked(admission=("reserve", "grow"))
    assert both.admissions("orca") == ("reserve", "grow") and both.admissions("rra") == ("reserve",)
    assert asked(admission=("grow",)).admissions("rra") == ()


def test_needs_are_the_iterations_of_the_mean_and_of_the_longest():
    """Prefill gives the first token, but for an encoder-decoder's."""
    assert asked().needs == (9.0, 9.0)
    assert asked(encoder_decoder=True).needs == (10.0, 10.0)
    lengths = LengthDistribution.from_samples([*range(1, 101)])
    workload = Workload("rising", LengthDistribution.fixed(9), lengths, 77)
    mean, longest = asked(workload=workload).needs
    assert (mean, longest) == (pytest.approx(49.5), lengths.quantile(0.99) - 1)
    assert asked(workload=workload, bound=PAPER_BOUND).needs[1] == 76
    assert asked(workload=workload, bound=BoundMeaning(percentile=90.0)).needs[1] == lengths.quantile(0.9) - 1


def test_the_clusters_tokens_are_all_replicas_with_the_margin():
    assert asked().tokens_s(3.0, 2) == pytest.approx(3.0 * 2 * 10 * MARGIN)
