"""How many sequences are resident under iteration-level scheduling, in how many KV blocks, by the rule of admission
(docs/theory.md, "Admission by grow").

*reserve*: each holds all blocks that it may ever need, and so many are admitted that these fit. *grow*: each holds the
blocks of its tokens so far, fewer, so that more fit; where their sum exceeds the pool, the newest is preempted, waits
until others have ended, and is prefilled again.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from xcore.specs.schedule import BLOCK_SIZE
from xsimulator.steady.load import Load

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Occupancy:
    """Residents and what they hold in the steady state."""

    residents: float
    """On average."""
    blocks: int
    """The pool that they need, as far as there is one."""
    preemptions: float = 0.0
    """Per request."""
    wait_iterations: float = 0.0
    """That a preempted request waits until its blocks are free again."""

    @property
    def prefills(self) -> float:
        """Per request."""
        return 1.0 + self.preemptions

    def entering(self, runs: float, idle: int, service: float = 0.0, variation: float = 0.0) -> float:
        """Return the sequences that enter an iteration, where each has `runs` iterations from the start of its prefill
        and its slot is empty for `idle` more. An iteration in which all slots are empty does not run.

        Prefills come one after the other, `service` iterations each with the coefficient of `variation`: a closed
        network of n residents, a station with a queue and one without. Who comes finds the queue of the n - 1 others,
        W = f·X·s²·κ / (1 - f·X·s) iterations with f = (n - 1)/n and κ = (1 + variation²)/2, and X = n / (stay + W).
        """
        residents, stay = self.residents, runs + idle
        runs_at_all = 1.0 - math.pow(idle / stay, residents)
        load, kappa = max(0.0, 1.0 - 1.0 / residents) * service, (1.0 + variation**2) / 2
        square, linear = load * (stay - service * kappa), stay + residents * load
        root = math.sqrt(max(0.0, linear**2 - 4.0 * square * residents))
        return 2.0 * residents / (linear + root) / runs_at_all


@dataclass(frozen=True)
class Pool:
    """KV blocks and how they are given to sequences."""

    grows: bool = False
    blocks: int | None = None
    """Of `BLOCK_SIZE` tokens, under *grow*; None: as many as the residents need."""

    def occupancy(self, load: Load, most: int, stay: float, rate: float) -> Occupancy:
        """With up to `most` residents, who stay for so many iterations, where no more than `rate` enter one."""
        if not self.grows:
            return Occupancy(most, load.pool_blocks("reserve", most))
        need = load.pool_blocks("grow", most)
        blocks = need if self.blocks is None else self.blocks
        return replace(_grown(load, most, min(float(most), rate * stay), stay, blocks), blocks=min(blocks, need))


RESERVED = Pool()


def _grown(load: Load, most: int, holding: float, stay: float, blocks: int) -> Occupancy:
    """The blocks of `holding` residents, of up to `most`, are a sum of independent ages, nearly normal. Where it
    exceeds the pool, memory decides how many are resident, and the blocks that the next prompt doesn't fit into are
    unused. As far as it doesn't, `most` are resident, as with reserved blocks: some of them wait for the budget.
    """
    each = load.resident_blocks("grow")
    deviation = math.sqrt(each.variance * holding)
    if blocks >= holding * each.longest:
        return Occupancy(most, blocks)
    beyond = (each.mean * holding - blocks) / deviation
    full = _NORMAL.cdf(beyond)
    missing = deviation * (_NORMAL.pdf(beyond) + beyond * full) + full * load.unused_blocks
    residents = max(1.0, most - full * (most - holding) - missing / each.mean)
    rate = residents / stay
    preemptions = full * _preempted_per_iteration(load, rate) / rate
    return Occupancy(residents, blocks, preemptions, max(1.0, 1.0 / rate))


def _preempted_per_iteration(load: Load, rate: float) -> float:
    """Sequences preempted in an iteration while memory is full, where `rate` finish (Poisson).

    Free blocks then are fewer than the next prompt needs, by any number alike. What decoding takes and finished
    sequences don't give back in an iteration is therefore taken from the newest residents, who hold little more than
    their prompts.
    """
    growth = rate * load.mean_iterations / BLOCK_SIZE
    released = load.prompt_blocks + load.mean_iterations / BLOCK_SIZE
    short, probability, finished = 0.0, math.exp(-rate), 0
    while growth > finished * released:
        short += probability * (growth - finished * released)
        finished += 1
        probability *= rate / finished
    return short / load.prompt_blocks
