"""The forecast of blocks against the lengths' distribution, enumerated."""

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.batching import BlockPool, Forecast, Sequence
from xcore.batching.sequence import DECODE, PREEMPTED, WAITING
from xcore.specs.workload import LengthDistribution

AHEAD = 6
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=12)


def resident(cached, generated, most, blocks=()):
    sequence = Sequence(0, max(1, cached - generated), most)
    sequence.status, sequence.cached, sequence.generated, sequence.blocks = DECODE, cached, generated, list(blocks)
    return sequence


def waiting(prompt, recomputed, most):
    sequence = Sequence(0, prompt, most)
    sequence.status = PREEMPTED if recomputed else WAITING
    sequence.recomputed = sequence.generated = recomputed
    return sequence


@given(LENGTHS, st.integers(1, 30), st.integers(0, 25), st.integers(1, 25), st.integers(1, 5), st.booleans())
def test_demand_is_the_mean_and_variance_over_the_lengths_that_are_left(lengths, prompt, tokens, more, size, waits):
    """An output longer than any known one is taken to run to its limit."""
    output, most = LengthDistribution.from_samples(lengths), tokens + more
    sequence = waiting(prompt, tokens, most) if waits else resident(prompt + tokens, tokens, most)
    mean, variance, largest = Forecast(output, AHEAD).demand(BlockPool(100, size), sequence)
    left = [(n, p) for n, p in zip(output.lengths, output.probabilities, strict=True) if n > tokens] or [(most, 1.0)]
    for k in range(1, AHEAD + 1):
        token = tokens + waits + k  # the one that iteration k makes: the prefill of a waiting sequence gives one
        needs = [-(-(prompt + tokens + k) // size) if token <= min(n, most) else 0 for n, _ in left]
        expected = np.average(needs, weights=[p for _, p in left])
        assert mean[k - 1] == pytest.approx(expected) and largest[k - 1] == max(needs)
        assert variance[k - 1] == pytest.approx(
            np.average((np.array(needs) - expected) ** 2, weights=[p for _, p in left]), abs=1e-9
        )


@pytest.mark.parametrize("iterations", [1, 3, 8, 20, 100])
@pytest.mark.parametrize("spare", [0, -1])
def test_sequences_are_admitted_while_the_blocks_suffice_to_the_last_iteration(iterations, spare):
    """Outputs of one known length: a resident and two that wait need a block for every token."""
    output = LengthDistribution.fixed(500)
    pool = BlockPool(10 + 20 + 30 + 3 * iterations + spare, 1)
    runs = resident(10, 4, 500, pool.allocate(10))
    outlook = Forecast(output, iterations).outlook(pool, [runs])
    assert outlook.admits(waiting(20, 0, 500))
    assert outlook.admits(waiting(30, 0, 500)) == (spare == 0)


@pytest.mark.parametrize("probability", [0.5, 0.9, 0.99])
def test_the_blocks_suffice_with_the_probability_asked_for(probability):
    """Each of 400 sequences needs a block after its prefill with probability 1/2: the normal quantile of their sum is
    enough, and a block less isn't.
    """
    output = LengthDistribution((1, 2), (0.5, 0.5))
    needed = 400 * 0.5 + NormalDist().inv_cdf(probability) * np.sqrt(400 * 0.25)
    found = {}
    for blocks in (np.ceil(needed), np.ceil(needed) - 1):
        outlook = Forecast(output, 1, probability).outlook(BlockPool(int(blocks), 64), [])
        found[blocks] = all(outlook.admits(waiting(8, 0, 2)) for _ in range(400))
    assert list(found.values()) == [True, False]
