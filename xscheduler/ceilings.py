"""Ceilings: throughputs that no point of a policy's space can exceed, from a few figures of its stages.

Ceilings are loose, cheap to compute and never too low. They count the computation at the largest batch that memory and
the latency bound allow, without pipeline bubbles. A margin covers tables in which larger batches still take a little
less time per sequence. Branch and bound opens spaces in the order of their ceilings. So on a large cluster it
evaluates only a few of many thousands of spaces.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from xcore.arrays import Array
from xcore.batching.admission import Admission
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.cost.side import Side
from xsimulator.steady.load import Load
from xsimulator.steady.prompts import Prompts
from xsimulator.steady.scenario import Scenario

MARGIN = 1.05
"""Factor that raises a ceiling and lowers a latency, to cover what the count leaves out."""
_PROMPTS = np.array([256.0, 2048.0])
"""Prompts prefilled together, up to the largest batch considered: a batch of short prompts has few tokens."""
_TOKENS = 2.0**19
"""Tokens of prompts and of decoding sequences together: more than any iteration has."""
_INTERLEAVED = np.geomspace(1.0, 2.0**20, 60)
"""Prompts prefilled during a query's stay; the last value exceeds what any memory holds."""
_BATCHES = np.unique(np.rint(np.geomspace(1, 8192, 40)))


@dataclass(frozen=True)
class SpaceLimits:
    """Limits of a space: no point has a higher throughput (output tokens/s) or a lower latency (seconds)."""

    ceiling: float
    quickest_s: float


@dataclass(frozen=True)
class Reach:
    """Decode speed of one side at rising numbers of residents; arrays [batches]."""

    batch: Array
    """Residents of all stages together."""
    iteration: Array
    """Seconds; lower bound on the time of an iteration."""
    busiest: Array
    """Seconds per iteration and sequence of the stage with the most to compute."""


@dataclass(frozen=True)
class EncodeReach:
    """The best case of encoding on separate devices."""

    rate: float
    """Prompts per second; 0 if the weights don't fit."""
    latency: float
    """Seconds that one prompt takes through all stages."""


def encode_reach(replica: ReplicaCost, prompts: Prompts) -> EncodeReach:
    """Return the best case of a replica's encoding side."""
    fits, side = replica.room((1.0, 1.0)) >= 1, replica.encode
    single_prompt = side.each(lambda group: prompts.encode(group, 1.0))
    rate = fits / encode_seconds(side, prompts)
    return EncodeReach(rate, float(single_prompt.sum()))


def encode_seconds(side: Side, prompts: Prompts) -> float:
    """Return the seconds per prompt on the slowest stage, in large batches."""
    slowest = side.each(lambda group: prompts.encode(group, _PROMPTS)).max(axis=-1)
    return float((slowest / _PROMPTS).min())


def quickest(scenario: Scenario, reach: Reach, longest: float, splits: bool) -> float:
    """Return a lower bound in seconds on the latency that is bounded, if a query has `longest` iterations.

    A latency of one output length is that of the mean prompt. The share of requests that a bound is for may have the
    shortest prompts. `splits`: the policy may encode a prompt in several iterations.
    """
    prompts, side = scenario.load.prompts, scenario.replica.encode
    if scenario.bound.of_length:
        stages = side.each(lambda group: prompts.encode(group, 1.0))
    else:
        stages = _shortest_prompt(scenario)
    return (_encode_latency(side, stages, splits) + longest * float(reach.iteration[0])) / MARGIN


def quickest_first(scenario: Scenario, splits: bool) -> float:
    """Return a lower bound in seconds on the time to first token of any query: that of the shortest prompt alone.

    `splits`: the policy may encode a prompt in several iterations.
    """
    return _encode_latency(scenario.replica.encode, _shortest_prompt(scenario), splits) / MARGIN


def _shortest_prompt(scenario: Scenario) -> Array:
    """Return the seconds of the shortest prompt alone on each stage, [stages]."""
    shortest = float(scenario.load.prompts.lengths.s[0])
    return scenario.replica.encode.each(lambda group: group.encode_fixed(1.0, shortest))


def _encode_latency(side: Side, stages: Array, splits: bool) -> float:
    """Return the least seconds in which a prompt passes all stages; `stages` are its seconds on each, [stages].

    The parts of a prompt are on several stages at a time. So the slowest stage counts, and on every other one a single
    token: the first part reaches the slowest stage over those before it, and the last part leaves over those after it.
    """
    if not splits:
        return float(stages.sum())
    pass_through = np.minimum(stages, side.decode(1.0, 1.0))
    return float((stages - pass_through).max() + pass_through.sum())


def quickest_token(scenario: Scenario) -> float:
    """Return a lower bound in seconds on the time per output token: an iteration of one sequence through all stages.

    0 if an iteration may give a sequence several tokens.
    """
    if scenario.load.speculation:
        return 0.0
    return float(scenario.replica.decode.decode(1.0, scenario.load.resident_context).sum()) / MARGIN


def reach(side: Side, context: float, residents: float, micro_batches: int | None = None) -> Reach:
    """Return the decode speed with up to `residents` residents of this mean context.

    They are in as many micro-batches as there are stages, or in `micro_batches`.
    """
    batch, count = np.append(_BATCHES[residents > _BATCHES], max(residents, 1.0)), micro_batches or len(side.stages)
    share = np.maximum(batch / count, 1.0)
    cells = side.decode(share, context)
    return Reach(batch, cells.sum(axis=-1), cells.max(axis=-1) / share)


def residents_that_fit(replica: ReplicaCost, load: Load, admission: Admission = "reserve") -> float:
    """Return how many sequences the memory of all stages holds if all have the mean length.

    Less than 1 if the weights alone are too large.
    """
    return replica.room((1.0, 1.0)) / load.resident_blocks(admission).mean


def batch_that_fits(scenario: Scenario) -> int:
    """Return the largest batch whose sequences' blocks fit on average.

    No larger batch fits with the 99.9th percentile of its blocks.
    """
    return max(1, int(scenario.replica.room((1.0, 1.0)) / scenario.load.reservation(None).mean) + 1)


def decode_rate(
    reach: Reach, iterations: float, longest: float, budget: float | None, iteration_s: float = inf
) -> float:
    """Return an upper bound on the decoded sequences/s if a query of `longest` iterations has `budget` seconds.

    `iteration_s`: the most seconds that an iteration may last on average. Iterations take longer with more residents.
    So the residents are fewer than the first batch of the grid that takes too long.
    """
    within = len(reach.batch) - 1
    if budget is not None or iteration_s < inf:
        most = min(iteration_s, inf if budget is None else budget / max(longest, 1e-12))
        meets = np.flatnonzero(np.maximum(reach.iteration, reach.batch * reach.busiest) <= most * MARGIN)
        if not len(meets):
            return 0.0
        within = min(int(meets[-1]) + 1, within)  # the largest batch in time is below the next grid point
    return _rate(reach, iterations, within)


def _rate(reach: Reach, iterations: float, within: int) -> float:
    """Return an upper bound on the decoded sequences/s with up to `within` residents."""
    busiest = float(reach.busiest[: within + 1].min())
    # A resident leaves after its iterations. None of them is shorter than one pass through all stages.
    flow = float((reach.batch / reach.iteration)[: within + 1].max())
    return min(1.0 / max(iterations * busiest, 1e-12), flow / max(iterations, 1e-12))


def residents_at(reach: Reach, iterations: float, rate: float) -> float:
    """Return the residents at which a side decodes `rate` sequences/s, or the most that fit if it can't."""
    seconds = np.maximum(reach.iteration, reach.batch * reach.busiest)
    enough = np.flatnonzero(reach.batch / seconds >= rate * max(iterations, 1e-12))
    return float(reach.batch[enough[0]] if len(enough) else reach.batch[-1])


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
        """Return an upper bound on the sequences/s as `decode_rate` does.

        `encode` is the prefill time per prompt in seconds, on the same stages.
        """
        curves = reach.iteration, reach.batch * reach.busiest
        iteration, busiest = (np.interp(self.least, *_lower_hull(reach.batch, seconds)) for seconds in curves)
        work = self.prompts * encode + longest * busiest * np.minimum(1.0, self.least)
        meets = np.flatnonzero(np.maximum(longest * iteration, work) <= budget * MARGIN)
        if not len(meets):
            return 0.0
        most = self.most[min(int(meets[-1]) + 1, len(self.most) - 1)]
        return _rate(reach, iterations, min(int(np.searchsorted(reach.batch, most)), len(reach.batch) - 1))


def _lower_hull(batch: Array, seconds: Array) -> tuple[Array, Array]:
    """Return the lower convex hull of these points: iterations take at least its seconds at their mean batch.

    With few tokens per expert, the curve itself is concave. So iterations of different batches take less time than as
    many iterations of their mean batch.
    """
    hull: list[int] = []
    for point in range(len(batch)):
        while len(hull) > 1:
            slopes = np.diff(seconds[[*hull[-2:], point]]) / np.diff(batch[[*hull[-2:], point]])
            if slopes[1] > slopes[0]:
                break
            hull.pop()
        hull.append(point)
    return batch[hull], seconds[hull]


def token_seconds(side: Side) -> Array:
    """Return the seconds of one token's matrix products on each stage, [stages].

    The weights are read once for thousands of tokens.
    """
    return side.each(lambda group: group.mixed(_TOKENS, 1.0, 0.0, 1.0)) / _TOKENS
