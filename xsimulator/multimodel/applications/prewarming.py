"""When to warm up what a unit that may follow needs (Hermes, Eq. 3, its inequality turned round)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def prewarm_at(
    seconds: Sequence[float] | np.ndarray,
    elapsed_s: float,
    probability: float,
    knob: float,
    warm_up_s: float,
    literal_eq3: bool = False,
) -> float | None:
    """Seconds since the running call's begin at which to begin warming up, not before `elapsed_s`; None: not at all.

    `seconds` are samples of the running call's duration, of which those above `elapsed_s` count (beyond all of them:
    now). `probability` p_s is that of the unit that needs warming up to follow, and `knob` K the probability that
    warming up has an effect which it takes to begin: not at all where p_s < K, else so that it ends at the completion's
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


def _quantile(rising: np.ndarray, level: float) -> float:
    """F^-1: the least sample of which at least `level` lie not above."""
    return float(rising[max(0, math.ceil(level * len(rising) - 1e-9) - 1)])


class Effect(NamedTuple):
    """What warming up brings and costs."""

    saved_s: float
    """Of the warm-up that nobody had to wait for."""
    wasted_s: float
    """Between being warm and being used, or being given up."""


def effect(begun_s: float, warm_up_s: float, completion_s: float, used: bool) -> Effect:
    """Of a warm-up begun at `begun_s` for a call that would follow at `completion_s`, and does if it is `used`."""
    waited_s = completion_s - begun_s
    return Effect(min(warm_up_s, max(0.0, waited_s)) if used else 0.0, max(0.0, waited_s - warm_up_s))


def expected_effect(
    seconds: Sequence[float] | np.ndarray,
    probability: float,
    knob: float,
    warm_up_s: float,
    literal_eq3: bool = False,
) -> Effect:
    """The mean over all durations that the samples have, decided when the call begins."""
    begun_s = prewarm_at(seconds, 0.0, probability, knob, warm_up_s, literal_eq3)
    if begun_s is None:
        return Effect(0.0, 0.0)
    effects = [effect(begun_s, warm_up_s, float(completion_s), used=True) for completion_s in seconds]
    saved_s, wasted_s = np.mean(effects, axis=0)
    return Effect(probability * float(saved_s), float(wasted_s))
