"""When to start warming up the resources of a possible successor (Hermes, Eq. 3, with its inequality reversed)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xcore.arrays import Array


def prewarm_at(
    seconds: Sequence[float] | Array,
    elapsed_s: float,
    probability: float,
    knob: float,
    warm_up_s: float,
    literal_eq3: bool = False,
) -> float | None:
    """Return the seconds since the running call's start at which to start warming up; None: don't warm up.

    The result is at least `elapsed_s`. `seconds` are samples of the running call's duration; those above `elapsed_s`
    count (if there are none: start now). `probability` p_s is the probability that the unit follows. `knob` K is the
    minimum probability that a warm-up is useful: if p_s < K, none is started; otherwise it ends at the completion's
    quantile K / p_s. A smaller K begins earlier.

    With `literal_eq3` it ends at the quantile 1 - K / p_s, as the equation is printed: a smaller K begins later.
    """
    if probability <= 0 or probability < knob:
        return None
    remaining = np.sort(np.asarray(seconds, np.float64))
    remaining = remaining[remaining > elapsed_s]
    if not len(remaining):
        return elapsed_s
    level = min(1.0, knob / probability)
    return max(elapsed_s, _quantile(remaining, 1 - level if literal_eq3 else level) - warm_up_s)


def _quantile(rising: Array, level: float) -> float:
    """Return F^-1: the smallest sample such that at least the share `level` of the samples are not above it."""
    return float(rising[max(0, math.ceil(level * len(rising) - 1e-9) - 1)])


class Effect(NamedTuple):
    """Benefit and cost of a warm-up."""

    saved_s: float
    """Part of the warm-up time that no call had to wait for."""
    wasted_s: float
    """Time between being warm and being used or dropped."""


def effect(begun_s: float, warm_up_s: float, completion_s: float, used: bool) -> Effect:
    """Return the effect of a warm-up started at `begun_s` for a call that would follow at `completion_s`.

    The call follows if the warm-up is `used`.
    """
    waited_s = completion_s - begun_s
    return Effect(min(warm_up_s, max(0.0, waited_s)) if used else 0.0, max(0.0, waited_s - warm_up_s))


def expected_effect(
    seconds: Sequence[float] | Array,
    probability: float,
    knob: float,
    warm_up_s: float,
    literal_eq3: bool = False,
) -> Effect:
    """Return the mean effect over all sampled durations, decided when the call begins."""
    begun_s = prewarm_at(seconds, 0.0, probability, knob, warm_up_s, literal_eq3)
    if begun_s is None:
        return Effect(0.0, 0.0)
    effects = [effect(begun_s, warm_up_s, float(completion_s), used=True) for completion_s in seconds]
    saved_s, wasted_s = np.mean(effects, axis=0)
    return Effect(probability * float(saved_s), float(wasted_s))
