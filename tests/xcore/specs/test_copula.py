"""Copulas: the dependence of inputs and outputs, kept by a workload without its requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.document import from_dict, to_dict
from xcore.errors import InputError
from xcore.specs.copula import Copula, at_ranks, class_weights
from xcore.specs.workload import LengthDistribution, RequestLengths, Workload


def drawn(rho, n=4000, seed=0, sigma=0.6):
    """Requests of log-normal lengths whose logarithms have the correlation `rho`."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, n))
    lengths = np.stack([500 * np.exp(sigma * a), 100 * np.exp(sigma * (rho * a + (1 - rho**2) ** 0.5 * b))])
    inputs, outputs = np.maximum(np.rint(lengths), 1).astype(int).tolist()
    return Workload.from_requests(f"rho {rho}", map(RequestLengths, inputs, outputs))


@pytest.mark.parametrize("rho", [-0.9, -0.4, 0.4, 0.9])
def test_requests_drawn_without_the_list_correlate_as_those_of_the_list(rho):
    workload = drawn(rho)
    assert workload.copula
    alone = from_dict(Workload, to_dict(workload.without_requests), "a schedule's workload")
    assert alone == workload.without_requests
    inputs, outputs = alone.sample(40_000, np.random.default_rng(1))
    assert np.corrcoef(inputs, outputs)[0, 1] == pytest.approx(workload.correlation, abs=0.06), (
        "within a class they are independent"
    )
    assert (inputs.mean(), outputs.mean()) == pytest.approx((workload.input.mean, workload.output.mean), rel=0.02)
    assert (inputs.std(), outputs.std()) == pytest.approx((workload.input.std, workload.output.std), rel=0.05)


@pytest.mark.parametrize("rho", [-0.9, 0.9])
def test_moments_of_inputs_are_those_of_the_requests_with_such_outputs(rho):
    workload = drawn(rho, 20_000)
    pairs = np.array([(row.input, row.output) for row in workload.requests], dtype=float)
    moments = workload.input_moments
    for power in (1, 2, 3):
        all_of_them = workload.output.p @ moments[power - 1]
        assert all_of_them == pytest.approx((pairs[:, 0] ** power).mean(), rel=1e-3)
    weighted = (workload.output.p * workload.output.s) @ moments[0] / workload.output.mean
    assert weighted == pytest.approx((pairs[:, 0] * pairs[:, 1]).mean() / pairs[:, 1].mean(), rel=0.02)


def test_what_may_be_chance_is_independence():
    assert all(drawn(0.0, n, seed).copula is None for n in (100, 500, 3000) for seed in range(5))
    assert drawn(0.9, 100).copula is None, "too few requests"
    assert len(drawn(0.9, 300).copula.shares) == 9
    constant = Workload.from_requests("equal", [RequestLengths(1 + i, 10) for i in range(1000)])
    assert constant.copula is None


def test_lengths_that_hardly_vary():
    """Most outputs are of one length, whose ranks fill several classes."""
    rng = np.random.default_rng(2)
    rare = rng.random(5000) < 0.1
    workload = Workload.from_requests("rare", [RequestLengths(900 if r else 100, 50 if r else 1) for r in rare])
    inputs, outputs = workload.without_requests.sample(20_000, rng)
    assert set(zip(inputs.tolist(), outputs.tolist(), strict=True)) >= {(900, 50), (100, 1)}
    mixed = np.mean((inputs == 900) != (outputs == 50))
    assert mixed < 0.03, "only within the class that both lengths share"


def test_other_outputs_say_nothing_of_pairs():
    workload = drawn(0.9)
    assert workload.with_outputs(LengthDistribution.fixed(7)).copula is None
    longer, factor, _ = workload.without_requests.scaled_to(800)
    assert factor < 1 and longer.copula == workload.copula, "ranks stay when lengths are scaled"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(lambda p: sum(p) > 0.1), st.integers(1, 20))
def test_classes_divide_the_requests_evenly(p, classes):
    p = np.array(p) / sum(p)
    weights = class_weights(p, classes)
    assert weights.sum(axis=1) == pytest.approx(p, abs=1e-9)
    assert weights.sum(axis=0) == pytest.approx(np.full(classes, 1 / classes), abs=1e-9)


def test_ranks_give_the_quantiles_of_the_distribution():
    lengths = LengthDistribution((1, 5, 9), (0.25, 0.5, 0.25))
    ranks = [0.0, 0.249, 0.25, 0.26, 0.74, 0.75, 0.76, 0.999]
    assert at_ranks(lengths, np.array(ranks)).tolist() == [lengths.quantile(rank) for rank in ranks]
    assert at_ranks(lengths, np.array(ranks)).tolist() == [1, 1, 1, 5, 5, 5, 9, 9]


@pytest.mark.parametrize("shares", [(), ((0.5, 0.0),), ((0.5, 0.2), (0.0, 0.3)), ((0.75, -0.25), (-0.25, 0.75))])
def test_shares_that_are_no_copula_are_refused(shares):
    with pytest.raises(InputError, match=r"copula (of|needs)"):
        Copula(shares)
