"""Ceilings: throughputs that no point of a policy's space can exceed, from a few figures of its stages.

They are loose, quick and never too low: work is counted at the largest batch that memory and the latency bound leave,
without a bubble, and with a margin for tables in which larger batches take a little less per sequence still. Branch and
bound opens spaces in their order, so that on a large cluster few of many thousands are ever looked at.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xcore.batching.admission import Admission
from xsimulator.cost.replica import ReplicaCost
from xsimulator.cost.side import Side
from xsimulator.steady.load import Load
from xsimulator.steady.prompts import Prompts
from xsimulator.steady.scenario import Scenario

Array = NDArray[np.float64]

MARGIN = 1.05
"""By what share a ceiling is raised, and a latency lowered, for what the count leaves out."""
_PROMPTS = np.array([256.0, 2048.0])
"""Prompts encoded together, up to the largest batch that is looked at: a batch of short ones has few tokens."""
_TOKENS = 2.0**19
"""Tokens of prompts and of decoding sequences together, more than any iteration has."""
_INTERLEAVED = np.geomspace(1.0, 2.0**20, 60)
"""Prompts prefilled during a query's stay; the last exceeds what any memory holds."""
_BATCHES = np.unique(np.rint(np.geomspace(1, 8192, 40)))


@dataclass(frozen=True)
class Bounds:
    """What no point of a space exceeds: output tokens per second, and from below seconds of latency."""

    ceiling: float
    quickest_s: float


@dataclass(frozen=True)
class Reach:
    """Decoding on a side at rising numbers of residents, arrays [batches]."""

    batch: Array
    """Residents, all stages together."""
    iteration: Array
    """Seconds of an iteration at least."""
    busiest: Array
    """Seconds per iteration and sequence of the stage that has most to do."""


@dataclass(frozen=True)
class EncodeReach:
    """The best case of encoding on devices of its own."""

    rate: float
    """Prompts per second; 0 where the weights don't fit."""
    latency: float
    """Seconds in which one prompt comes through."""


def encode_reach(replica: ReplicaCost, prompts: Prompts) -> EncodeReach:
    """Of a replica's encoding side alone."""
    fits, side = replica.room((1.0, 1.0)) >= 1, replica.encode
    single_prompt = side.each(lambda group: prompts.encode(group, 1.0))
    rate = fits / encode_seconds(side, prompts)
    return EncodeReach(rate, float(single_prompt.sum()))


def encode_seconds(side: Side, prompts: Prompts) -> float:
    """Seconds per prompt on the slowest stage, in large batches."""
    slowest = side.each(lambda group: prompts.encode(group, _PROMPTS)).max(axis=-1)
    return float((slowest / _PROMPTS).min())


def quickest(scenario: Scenario, reach: Reach, longest: float) -> float:
    """Seconds below which no query of `longest` iterations comes through."""
    prompts = scenario.load.prompts
    encode_latency = float(scenario.replica.encode.each(lambda group: prompts.encode(group, 1.0)).sum())
    return (encode_latency + longest * float(reach.iteration[0])) / MARGIN


def reach(side: Side, context: float, residents: float) -> Reach:
    """Decoding with up to so many residents of this mean context."""
    batch = np.append(_BATCHES[residents > _BATCHES], max(residents, 1.0))
    share = np.maximum(batch / len(side.stages), 1.0)
    cells = side.decode(share, context)
    return Reach(batch, cells.sum(axis=-1), cells.max(axis=-1) / share)


def residents_that_fit(replica: ReplicaCost, load: Load, admission: Admission = "reserve") -> float:
    """Sequences for which the memory of all stages has room, were all of mean length; less than 1 where the weights
    alone are too large.
    """
    return replica.room((1.0, 1.0)) / load.resident_blocks(admission).mean


def batch_that_fits(scenario: Scenario) -> int:
    """The largest batch whose sequences' blocks fit on average: no larger one fits with its 99.9th percentile."""
    return max(1, int(scenario.replica.room((1.0, 1.0)) / scenario.load.reservation(None).mean) + 1)


def decode_rate(reach: Reach, iterations: float, longest: float, budget: float | None) -> float:
    """Return an upper bound on the decoded sequences/s where a query of `longest` iterations has `budget` seconds."""
    within = len(reach.batch) - 1
    if budget is not None:
        meets = np.flatnonzero(np.maximum(reach.iteration, reach.batch * reach.busiest) * longest <= budget * MARGIN)
        if not len(meets):
            return 0.0
        within = min(int(meets[-1]) + 1, within)  # the largest batch in time lies before the next one looked at
    return _rate(reach, iterations, within)


def _rate(reach: Reach, iterations: float, within: int) -> float:
    """Return an upper bound on the decoded sequences/s with up to `within` residents."""
    busiest = float(reach.busiest[: within + 1].min())
    # what is resident leaves after its iterations, none of which is shorter than the last stage's way around
    flow = float((reach.batch / reach.iteration)[: within + 1].max())
    return min(1.0 / max(iterations * busiest, 1e-12), flow / max(iterations, 1e-12))


@dataclass(frozen=True)
class Interleaved:
    """Bounds on RRA's residents, by the prompts prefilled during the longest query's stay; arrays [prompts].

    RRA skips iterations without sequences. So an iteration that runs has at least one resident, however few prompts
    arrive.
    """

    prompts: Array
    """Numbers of prompts, rising from 1."""
    least: Array
    """Fewest mean residents in the longest query's iterations."""
    most: Array
    """Most mean residents in an iteration that runs."""

    @staticmethod
    def of(load: Load, longest: float, stages: int) -> "Interleaved":
        """Build the bounds for a load and the longest query's number of iterations.

        With w prompts, at least as many iterations run as the longest of w queries needs. That is the number if all
        begin together; otherwise more run. Each stage's micro-batch has an equal share of the queries.
        """
        need, p = load.iterations
        needed = np.minimum(need, longest)
        no_longer = np.concatenate([[0.0], np.cumsum(p)]) ** (_INTERLEAVED[:, None] / stages)
        runs = np.maximum(np.diff(no_longer) @ needed, 1e-12)
        return Interleaved(
            _INTERLEAVED,
            _INTERLEAVED * float(needed @ p) / max(longest, 1e-12),
            _INTERLEAVED * load.mean_iterations / runs,
        )

    def rate(self, reach: Reach, iterations: float, longest: float, budget: float, encode: float) -> float:
        """Return an upper bound on the sequences/s as `decode_rate` does, with `encode` seconds of prefill per prompt
        on the same stages.
        """
        iteration, busiest = (np.interp(self.least, reach.batch, y) for y in (reach.iteration, reach.busiest))
        work = self.prompts * encode + longest * self.least * busiest
        meets = np.flatnonzero(np.maximum(longest * iteration, work) <= budget * MARGIN)
        if not len(meets):
            return 0.0
        most = self.most[min(int(meets[-1]) + 1, len(self.most) - 1)]
        return _rate(reach, iterations, min(int(np.searchsorted(reach.batch, most)), len(reach.batch) - 1))


def token_seconds(side: Side) -> Array:
    """[stages]: seconds of one token's products where weights are read for thousands of tokens at once."""
    return side.each(lambda group: group.mixed(_TOKENS, 1.0, 0.0, 1.0)) / _TOKENS
