"""The number of resident sequences under iteration-level scheduling, and their KV blocks, by the admission rule.

See docs/theory.md, "Admission by grow". Under *reserve*, each sequence holds all blocks that it may ever need, and only
as many are admitted as fit. Under *grow*, each sequence holds the blocks of its tokens so far, so that more sequences
fit. If the sum exceeds the pool, the newest sequence is preempted, waits until others have ended, and is prefilled
again.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from xcore.specs.schedule import BLOCK_SIZE
from xsimulator.steady.load import Load
from xsimulator.steady.outcome import Needs, StageDemand

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Occupancy:
    """The residents and their blocks in the steady state."""

    residents: float
    """Mean number of residents."""
    blocks: int
    """Blocks of the pool that the residents need, at most those that exist."""
    preemptions: float = 0.0
    """Preemptions per request."""
    wait_iterations: float = 0.0
    """Iterations that a preempted request waits until its blocks are free again."""

    @property
    def prefills(self) -> float:
        """Return the prefills per request."""
        return 1.0 + self.preemptions

    def entering(self, runs: float, idle: int, service: float = 0.0, variation: float = 0.0) -> float:
        """Return the sequences that enter an iteration.

        Each sequence has `runs` iterations from the start of its prefill, and its slot is empty for `idle` more. An
        iteration in which all slots are empty does not run.

        Prefills come one after the other, `service` iterations each with the coefficient of `variation`. This is a
        closed network of n residents with two stations: one with a queue and one without. A new prefill finds the queue
        of the n - 1 other residents. It waits W = f·X·s²·κ / (1 - f·X·s) iterations. Here f = (n - 1)/n, κ = (1 +
        variation²)/2 and X = n / (stay + W).
        """
        residents, stay = self.residents, runs + idle
        runs_at_all = 1.0 - math.pow(idle / stay, residents)
        load, kappa = max(0.0, 1.0 - 1.0 / residents) * service, (1.0 + variation**2) / 2
        square, linear = load * (stay - service * kappa), stay + residents * load
        root = math.sqrt(max(0.0, linear**2 - 4.0 * square * residents))
        return 2.0 * residents / (linear + root) / runs_at_all


@dataclass(frozen=True)
class Pool:
    """KV blocks, and how sequences get them."""

    grows: bool = False
    blocks: int | None = None
    """Blocks of `BLOCK_SIZE` tokens, under *grow*; None: as many as the residents need."""

    def occupancy(self, load: Load, most: int, stay: float, rate: float) -> Occupancy:
        """Return the occupancy with up to `most` residents.

        They stay `stay` iterations, and at most `rate` of them enter per iteration.
        """
        shared = load.shared_blocks
        if not self.grows:
            return Occupancy(most, shared + load.pool_blocks("reserve", most))
        need = load.pool_blocks("grow", most)
        blocks = need if self.blocks is None else max(self.blocks - shared, 1)
        grown = _grown(load, most, min(float(most), rate * stay), stay, blocks)
        return replace(grown, blocks=shared + min(blocks, need))


RESERVED = Pool()


def reserved_needs(load: Load, most: int, tokens: float) -> Needs:
    """Return what `most` residents and an iteration of at most `tokens` tokens need if blocks are reserved."""
    return Needs(StageDemand(RESERVED.occupancy(load, most, 1.0, 1.0).blocks, tokens, most), most)


def _grown(load: Load, most: int, holding: float, stay: float, blocks: int) -> Occupancy:
    """Return the occupancy under *grow* with up to `most` residents, of which `holding` hold blocks.

    The blocks depend on the residents' ages, so their sum is nearly normal. If the sum exceeds the pool, memory limits
    the residents, and blocks that are too few for the next prompt stay unused. Otherwise `most` are resident, as with
    reserved blocks: some of them wait for the budget.
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
    """Return the sequences preempted in an iteration while memory is full, if `rate` finish (Poisson).

    The free blocks are then fewer than the next prompt needs; each number is equally likely. If decoding needs more
    blocks than finished sequences free, it takes them from the newest residents, which hold little more than their
    prompts.
    """
    output = load.growth * load.mean_iterations / BLOCK_SIZE
    growth, released = rate * output, load.prompt_blocks + output
    short, probability, finished = 0.0, math.exp(-rate), 0
    while growth > finished * released:
        short += probability * (growth - finished * released)
        finished += 1
        probability *= rate / finished
    return short / load.prompt_blocks
