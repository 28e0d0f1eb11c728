"""Adjusted batches (paper section 5.2): how much of the variation of their work remains (docs/theory.md)."""

from math import sqrt

from xsimulator.steady.scenario import Scenario

RESIDENTS = 0.5
"""Share of the residents' standard deviation that remains in RRA, where each batch replaces those that have ended."""


def tokens_left(scenario: Scenario, encode_batch: int) -> float:
    """Return the share of the standard deviation of a batch's tokens that remains; 1 without adjustment.

    The tokens end anywhere within the share of their mean. One prompt of a batch has been passed over often enough and
    is encoded whatever its length, so its variance remains.
    """
    inputs = scenario.load.workload.input
    if scenario.adjust is None or not inputs.std:
        return 1.0
    relative = inputs.std / inputs.mean / sqrt(encode_batch)
    return min(1.0, sqrt(scenario.adjust**2 / 3 / relative**2 + 1 / encode_batch))


def tokens_left_in_part(left: float, parts: int) -> float:
    """Return the same for one of the batch's `parts` micro-batches: only their sum is adjusted."""
    return sqrt(1.0 - (1.0 - left**2) / parts)


def residents_left(scenario: Scenario) -> float:
    """Return the share of the standard deviation of RRA's residents that remains; 1 without adjustment."""
    return 1.0 if scenario.adjust is None else RESIDENTS
