"""Iterations that give several tokens, against draws token by token."""

import numpy as np
import pytest

from tests.xcore.small_specs import schedule
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster_plan import PlannedModel
from xcore.specs.request_times import summarise
from xcore.specs.speculation import Speculation

RATE, DRAFTED = 0.7, 4
OF_RATE = Speculation(tuple(RATE**i for i in range(1, DRAFTED + 1)))


def iterations(speculation, tokens, count, rng):
    """Iterations until `tokens` tokens are there: each accepts draft tokens until the first rejection."""
    rates = np.array(speculation.acceptance) / np.array([1.0, *speculation.acceptance[:-1]])
    needed = []
    for _ in range(count):
        given = n = 0
        while given < tokens:
            accepted = rng.random(len(rates)) < rates
            given += 1 + int(np.argmin(np.append(accepted, False)))
            n += 1
        needed.append(n)
    return np.array(needed)


def test_a_rate_gives_the_papers_mean_tokens():
    """(1 - α^(γ + 1)) / (1 - α)."""
    assert OF_RATE.tokens_per_step == pytest.approx((1 - RATE ** (DRAFTED + 1)) / (1 - RATE))
    assert OF_RATE.chances.sum() == pytest.approx(1.0) and (OF_RATE.rows, OF_RATE.drafted) == (5, 4)


@pytest.mark.parametrize(
    "speculation", [OF_RATE, Speculation((0.9, 0.2)), Speculation((1.0, 1.0)), Speculation((0.0,))]
)
@pytest.mark.parametrize("tokens", [1, 2, 7, 120])
def test_iterations_are_those_of_draws_token_by_token(speculation, tokens):
    rng = np.random.default_rng(1)
    drawn = iterations(speculation, tokens, 600, rng)
    mean, deviation = (float(figure) for figure in speculation.iterations(tokens))
    assert drawn.mean() == pytest.approx(mean, abs=4 * deviation / 600**0.5 + 1e-9)
    assert drawn.std() == pytest.approx(deviation, rel=0.2, abs=0.02)
    fast = speculation.draw(np.full(2000, tokens), rng)
    assert fast.mean() == pytest.approx(mean, abs=4 * deviation / 2000**0.5 + 1e-9)
    assert fast.std() == pytest.approx(deviation, rel=0.1, abs=0.02)


def test_long_outputs_continue_the_exact_ones():
    drawn = OF_RATE.draw(np.full(4000, 3000), np.random.default_rng(2))
    mean, deviation = OF_RATE.iterations(3000)
    assert drawn.mean() == pytest.approx(float(mean), rel=1e-3)
    assert drawn.std() == pytest.approx(float(deviation), rel=0.05)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"acceptance": ()}, "0 draft tokens"),
        ({"acceptance": (0.5, 0.6)}, "impossible"),
        ({"acceptance": (1.2,)}, "impossible"),
        ({"acceptance": (0.5,), "layers": 0.0}, "no draft model"),
        ({"acceptance": (0.5,), "layers": 1.0, "draft": builtin_model("gpt2")}, "one of the two"),
    ],
)
def test_impossible_speculation_is_refused(fields, why):
    with pytest.raises(InputError, match=why):
        Speculation(**fields)


def test_a_plan_of_several_models_refuses_a_schedule_that_drafts():
    estimate = summarise((), 0.0)
    assert PlannedModel("a", (0,), schedule("orca"), estimate).schedule.speculation is None
    with pytest.raises(InputError, match="'a' of the plan drafts tokens"):
        PlannedModel("a", (0,), schedule("orca", speculation=OF_RATE), estimate)
