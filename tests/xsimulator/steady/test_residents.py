"""The exact steady state against Monte Carlo: a long stream of queries whose every iteration is counted."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.specs.workload import LengthDistribution, Workload, task
from xsimulator.steady.residents import decode_iterations_of, length_biased_context, steady_state

TASKS = ("S", "T", "G", "C1", "C2")
ITERATIONS = (1, 7, 13, 32)


def stream(workload, encode_batch, iterations, phases, seed=0):
    """Sequences decoding and their resident tokens, each [phases, iterations], of phases in the steady state.

    Every query is followed from the phase that encodes it through each of its own iterations; nothing is shared with
    the formulas but the definition of D(S).
    """
    rng = np.random.default_rng(seed)
    ramp = -(-workload.output.max // iterations)
    n = encode_batch * (phases + ramp)
    begin = np.repeat(np.arange(phases + ramp), encode_batch) * iterations  # the iteration before its first
    inputs = workload.input.sample(n, rng)
    need = workload.output.sample(n, rng) - 1
    end, length = begin + need, (phases + ramp) * iterations

    def present(weight):
        joined = np.bincount(begin, weight, length)[:length]
        return np.cumsum(joined - np.bincount(np.minimum(end, length), weight, length + 1)[:length])

    # In iteration g (from 1) of all, a query that joined after `begin` has the context input + g - begin.
    resident = present(np.ones(n))
    tokens = present((inputs - begin).astype(np.float64)) + np.arange(1, length + 1) * resident
    skip = ramp * iterations
    return (a[skip:].reshape(phases, iterations) for a in (np.rint(resident), np.rint(tokens)))


@functools.cache
def observed(name, iterations):
    """Means over many phases for one sequence per phase: active [u], context [u]."""
    resident, tokens = stream(task(name), 200, iterations, max(300, 6000 // iterations))
    return resident.mean(axis=0) / 200, tokens.mean(axis=0) / resident.mean(axis=0)


@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("name", TASKS)
def test_agrees_with_monte_carlo_to_one_percent(name, iterations):
    steady = steady_state(task(name), iterations)
    active, context = observed(name, iterations)
    assert steady.batch_ratio == pytest.approx(active[0], rel=0.01)
    np.testing.assert_allclose(steady.active, active, rtol=0.01, atol=0.003)
    np.testing.assert_allclose(steady.context, context, rtol=0.01)


def test_the_papers_and_the_exact_steady_state_on_task_s():
    """Spec section 3.1: 4.06 against 5.00 sequences per encoded one at N_D = 7."""
    assert steady_state(task("S"), 7, True, "paper").batch_ratio == pytest.approx(4.06, abs=0.005)
    assert steady_state(task("S"), 7, True, "exact").batch_ratio == pytest.approx(5.00, abs=0.005)


@pytest.mark.parametrize("iterations", ITERATIONS)
def test_the_papers_form_is_its_section_6_by_the_letter(iterations):
    """P_D(U|S) and P_D(U) by loops; a batch of B_D loses P_D(U) in each iteration, and B_E in all."""
    workload = task("T")
    ends = dict.fromkeys(range(1, iterations + 1), 0.0)
    for length, p in zip(workload.output.s, workload.output.p, strict=True):
        for u in ends:
            if length <= iterations:
                ends[u] += p * (u == length)
            else:
                ends[u] += p * (u == 1 + (length - 1) % iterations) / -(-length // iterations)
    steady = steady_state(workload, iterations, form="paper")
    batch = 1 / sum(ends.values())
    active = [batch * (1 - sum(ends[v] for v in range(1, u))) for u in ends]
    np.testing.assert_allclose(steady.active, active, rtol=1e-12)
    assert steady.batch_ratio == pytest.approx(active[0]) == pytest.approx(batch)
    assert batch - active[-1] + batch * ends[iterations] == pytest.approx(1)


def test_one_iteration_is_littles_law():
    workload = task("T")
    steady = steady_state(workload, 1, encoder_decoder=True)
    assert steady.batch_ratio == pytest.approx(workload.output.mean)
    assert steady.context[0] == pytest.approx(length_biased_context(workload, True))


LAWS = st.dictionaries(st.integers(1, 40), st.floats(0.05, 1.0), min_size=1, max_size=8).map(
    lambda d: LengthDistribution(tuple(sorted(d)), tuple(d[k] / sum(d.values()) for k in sorted(d)))
)


@given(LAWS, LAWS, st.integers(1, 50), st.booleans())
def test_work_is_conserved(inputs, outputs, iterations, encoder_decoder):
    """Whatever N_D is, a phase does the iterations that one query needs, at the length-biased mean context."""
    workload = Workload("distribution", inputs, outputs, outputs.max)
    steady = steady_state(workload, iterations, encoder_decoder)
    need, p = decode_iterations_of(outputs, encoder_decoder)
    assert steady.active.sum() == pytest.approx(float(need @ p))
    assert steady.active @ steady.context == pytest.approx(
        float(need @ p) * length_biased_context(workload, encoder_decoder)
    )
    assert (np.diff(steady.active) <= 1e-12).all()
    assert steady.active[0] == pytest.approx(steady.batch_ratio)


def test_a_certain_length():
    """Every query alike: two phases each, side by side."""
    workload = Workload.fixed(10, 5)
    steady = steady_state(workload, 2)  # D = 4: two phases
    np.testing.assert_allclose(steady.active, [2.0, 2.0])
    np.testing.assert_allclose(steady.context, [12.0, 13.0])  # ages 1 and 2: 11 and 13, then 12 and 14


def test_queries_of_one_token_never_decode():
    steady = steady_state(Workload.fixed(10, 1), 3)
    assert steady.batch_ratio == 0.0
    assert not steady.active.any()
