"""Output lengths: what ends them, whose stream they come from, and what a context hides of them."""

import numpy as np
import pytest

from xcore.errors import InputError
from xcore.specs.workload import LengthDistribution
from xmulti.stages.output_lengths import capped, lengths_at, quantiles, uncensored

OUTPUTS = LengthDistribution((1, 10, 100), (0.25, 0.5, 0.25))


def test_lengths_lie_at_their_quantiles():
    assert lengths_at(OUTPUTS, np.array([0.0, 0.2, 0.3, 0.7, 0.8, 0.999])).tolist() == [1, 1, 10, 10, 100, 100]


def test_cap_and_context_end_an_output():
    wanted, prompts = np.array([100, 100, 3]), np.array([10, 60, 60])
    assert capped(wanted, prompts, 64).tolist() == [54, 4, 3]
    assert capped(wanted, prompts, 64, cap=20).tolist() == [20, 4, 3]
    with pytest.raises(InputError, match="64 tokens fills the context"):
        capped(wanted, np.array([1, 1, 64]), 64)


def test_models_have_streams_of_their_own_unless_shared():
    one, other = quantiles(50, 0, "one"), quantiles(50, 0, "other")
    assert (one == quantiles(50, 0, "one")).all() and (one != other).all()
    assert (quantiles(50, 0, "one", shared=True) == quantiles(50, 0, "other", shared=True)).all()
    assert (one != quantiles(50, 1, "one")).all()


def test_a_context_that_cuts_outputs_short_does_not_bias_them():
    """Prompts of many lengths leave room for some outputs only; a histogram has too many short ones."""
    random = np.random.default_rng(0)
    context, true = 100, LengthDistribution((5, 30, 60, 90), (0.2, 0.3, 0.3, 0.2))
    prompts = random.integers(1, 95, 200_000)
    outputs = capped(true.sample(len(prompts), random), prompts, context)
    estimated = uncensored(prompts, outputs, context)
    share = dict(zip(estimated.lengths, estimated.probabilities, strict=True))
    for length, expected in zip((5, 30, 60), (0.2, 0.3, 0.3), strict=True):
        assert share[length] == pytest.approx(expected, abs=0.01)
        assert abs(np.mean(outputs == length) - expected) > 0.01 or length == 5
    assert sum(estimated.probabilities) == pytest.approx(1.0)


def test_outputs_that_never_end_are_on_the_context():
    estimated = uncensored(np.array([10, 20]), np.array([90, 80]), 100)
    assert (estimated.lengths, estimated.probabilities) == ((100,), (1.0,))
    with pytest.raises(InputError):
        uncensored(np.array([10]), np.array([91]), 100)
