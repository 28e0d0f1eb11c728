"""Iteration-level scheduling of equal requests that begin together: they stay in step, so that one round of theirs,
followed prompt by prompt, is the steady state.

Who is encoded in one iteration also ends in one, and is followed by prompts that begin together again. Lengths that
vary would scatter them over all iterations, which is what the other formulas count with.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xsimulator.cost.group import Group, PartSeconds
from xsimulator.cost.recurrences import slots
from xsimulator.steady.occupancy import Occupancy
from xsimulator.steady.outcome import Demand, Lifetime, Outcome
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.times import Times

Array = NDArray[np.float64]

_MEASURED = 2
"""Rounds, in each of which every slot is taken once, that are looked at; those before let the slots fall in step."""
_BEFORE = (6, 48, 2000)
"""The fewest and the most rounds before them, and between these so many that there are so many prompts."""
_MOST = 60_000
"""Parts of prompts that are followed at most."""


_ITERATION_LESS = 0.55
"""The share of a TTFT of two iterations that one less takes off, the longer one at most."""


@dataclass(frozen=True)
class Turns:
    """Prompts in the order in which they come, and the iterations that encode any of them; arrays."""

    starts: Array
    """[prompts]: the first iteration of each."""
    ends: Array
    """[prompts]: the last one."""
    iterations: Array
    """[n]: numbers of the iterations with prompts, or with idle slots, rising."""
    decoding: Array
    """[n]: sequences that decode beside them."""
    rows: NDArray[np.intp]
    """[parts]: the place of each part's iteration in `iterations`, rising."""
    froms: Array
    """[parts]: where in its prompt each begins."""
    untils: Array
    """[parts]: and ends."""

    def since(self, iteration: float) -> "Turns":
        """The same without the iterations before this one."""
        row = int(np.searchsorted(self.iterations, iteration))
        part = int(np.searchsorted(self.rows, row))
        return Turns(
            self.starts,
            self.ends,
            self.iterations[row:],
            self.decoding[row:],
            self.rows[part:] - row,
            self.froms[part:],
            self.untils[part:],
        )


@dataclass(frozen=True)
class Window:
    """The time after one iteration and until the end of another."""

    begin: float
    seconds: float
    rate: float
    """Prompts per second whose encoding ends within it: all of its last iteration, as a round need not end there."""

    @classmethod
    def of(cls, edges: Array, ends: Array, end: Callable[[Array], Array]) -> "Window":
        """Build it from its edges, iterations [2], and the last iterations of all prompts, rising."""
        begin, until = (float(second) for second in end(edges))
        encoded = np.searchsorted(ends, edges, side="right")
        return cls(begin, until - begin, float(encoded[1] - encoded[0]) / (until - begin))

    def present(self, begins: Array, finishes: Array) -> float:
        """Return the mean number of sequences that have begun and not finished."""
        overlap = np.minimum(finishes, self.begin + self.seconds) - np.maximum(begins, self.begin)
        return float(np.maximum(overlap, 0.0).sum()) / self.seconds


def equal(scenario: Scenario) -> bool:
    """Whether all requests are equal, and run on one stage."""
    workload = scenario.load.workload
    return len(workload.input.s) == len(workload.output.s) == len(scenario.replica.stages) == 1


def ttft_slack(scenario: Scenario) -> float:
    """Return the share by which TTFT may fall where there are more residents."""
    return _ITERATION_LESS if equal(scenario) else 0.0


def turns(residents: int, length: float, budget: float, share: float, stay: float, idle: int = 0) -> Turns | None:
    """What `slots` follows, the last rounds of it; None where that would be too long."""
    fewest, most_rounds, enough = _BEFORE
    rounds = min(max(enough // residents, fewest), most_rounds) + _MEASURED + 1  # of the last, the followers alone
    prompts = residents * rounds
    most = int(prompts * (length // max(budget - share * residents, 1.0) + 2 + idle))
    if most > _MOST:
        return None
    starts, ends = np.empty((2, prompts))
    iterations, decodes, rows, froms, untils = np.empty((5, most))
    written = (starts, ends, iterations, decodes, rows, froms, untils)
    count, parts = slots(*written, length, budget, share, stay, idle, residents)
    places = rows[:parts].astype(np.intp)
    found = Turns(starts, ends, iterations[:count], decodes[:count], places, froms[:parts], untils[:parts])
    return found.since(starts[-residents * (_MEASURED + 1) - 1])


def outcome(
    scenario: Scenario, found: Turns, residents: int, occupancy: Occupancy, most_tokens: float, unit: float
) -> Outcome:
    """The last rounds of these turns, in iterations of at most so many tokens; prompts are cut in units of `unit`."""
    load, count = scenario.load, residents * _MEASURED
    stay, shift = load.mean_iterations, 1.0 if load.first_by_encoding else 0.0
    idle = float(scenario.replica.decode.decode(np.array([float(residents)]), load.resident_context)[0, 0])
    seconds = _seconds(scenario, found, unit)
    longer = np.concatenate([[0.0], np.cumsum(seconds - idle)])

    def end(iteration: Array) -> Array:
        """Seconds at the end of iterations."""
        time: Array = (iteration + 1) * idle + longer[np.searchsorted(found.iterations, iteration, side="right")]
        return time

    kept = slice(-count - residents, -residents)
    first, last = found.starts[kept], found.ends[kept]
    begin, encoded, finish = end(first - 1), end(last), end(last + stay)
    window = Window.of(np.array([found.ends[-count - residents - 1], last[-1]]), found.ends, end)
    after, latency = finish - encoded, finish - begin
    between = float(after.mean()) / stay if stay else 0.0

    def lifetime(lengths: Array) -> Lifetime:
        need = np.maximum(lengths - shift, 0.0)
        means = float((encoded - begin).mean()) + need * between
        return Lifetime(means, np.full_like(need, latency.std()), np.full_like(need, after.std()))

    taken = (encoded if shift else end(last + 1)) - begin
    times = Times.seen(taken)
    alone = idle * float(found.ends[-1] - found.ends[-1 - count])
    return Outcome(
        throughput=window.rate,
        lifetime=lifetime,
        first_token=Times.normal(times.mean) if not scenario.variation else times,
        demand=Demand(occupancy.blocks, most_tokens, residents),
        decode_batch=residents,
        residents=lambda: window.present(end(found.starts - 1), end(found.ends + stay)),
        busy=np.ones(1),
        seen=(Times.seen(latency), Times.seen((finish - begin - taken) / max(stay + shift - 1.0, 1.0))),
        binding="decoding" if alone > 0.5 * window.seconds else "encoding",
    )


def _seconds(scenario: Scenario, found: Turns, unit: float) -> Array:
    """Seconds of the iterations that are told of."""
    rows, count = found.rows, len(found.iterations)
    parts, past = (found.untils - found.froms) * unit, found.froms * unit
    fresh = found.froms == 0
    beside = np.bincount(rows[fresh], minlength=count).astype(np.float64)
    tokens, chunks = np.bincount(rows, parts, count), np.bincount(rows, minlength=count).astype(np.float64)

    def of(group: Group) -> PartSeconds:
        together = beside[rows[fresh]]
        attention = np.bincount(rows[fresh], group.prompt_attention(together, parts[fresh]) / together, count)
        if not fresh.all():
            attention += np.bincount(rows[~fresh], group.chunk_attention(parts[~fresh], past[~fresh]), count)
        return group.mixed(tokens, chunks, found.decoding, scenario.load.resident_context, attention)

    seconds = scenario.replica.decode.each(of)[:, 0]
    return np.where((tokens > 0) | (found.decoding > 0), seconds, 0.0)
