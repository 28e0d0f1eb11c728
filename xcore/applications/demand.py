"""Demand of applications, estimated by random walks over their demand graphs and refined by a run's observed calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcore.applications.demand_graph import END, LLM, DemandGraph, DemandStep, JointRecords
from xcore.arrays import Array, Places

WALKS = 1000
MOST_HOPS = 50
"""Calls after which a walk ends."""
BUCKETS = 10
"""Number of buckets of equal width over each variable's range in joint records."""
LEAST_CORRELATION = 0.5
"""Pearson's coefficient above which a variable of one call predicts one of the next call; negative ones never do."""
LEAST_RECORDS = 10
"""Minimum number of matching records; with fewer, all records are used."""


@dataclass(frozen=True)
class ServiceRates:
    """Seconds of service per token of an LLM; the defaults are from Hermes' repository."""

    prefill_s: float = 1e-4
    decode_s: float = 0.06

    def prefill_seconds(self, tokens: Sequence[int], share: float) -> float:
        """Return seconds to prefill prompts one after the other; as in `IterationCost`."""
        return sum(tokens) * self.prefill_s

    def decode_seconds(self, sequences: int, contexts: Array, share: float) -> Array:
        """Return seconds of a decoding iteration, the same for every batch; as in `IterationCost`."""
        return np.full(contexts.shape, self.decode_s)


class DemandSamples(NamedTuple):
    """Sampled seconds of service, float64 [WALKS] each, the i-th of both in the same walk."""

    total_s: Array
    """Service with parallel requests summed: the cost of an application's completion."""
    longest_s: Array
    """Service of the longest of parallel requests: the least duration, which counts for deadlines."""

    def plus(self, other: "DemandSamples") -> "DemandSamples":
        """Return samples of this demand followed by another one."""
        return DemandSamples(self.total_s + other.total_s, self.longest_s + other.longest_s)


class Seen(NamedTuple):
    """A run's last call of an LLM unit."""

    unit: str
    input_tokens: int
    output_tokens: int
    parallel: int


class ApplicationDemand:
    """The demand of one application, from its start or from any unit on."""

    def __init__(self, graph: DemandGraph, rates: ServiceRates, seed: int = 0, walks: int = WALKS):
        """Set up the demand with `walks` samples of each distribution, drawn from `seed`.

        Equal queries get equal samples.
        """
        self.graph = graph
        self.rates = rates
        self.walks = walks
        self._random = np.random.default_rng(seed)
        self._units = {unit.name: _Samples(unit, rates) for unit in graph.units}
        self._pairs = {(joint.upstream, joint.downstream): Correlations(joint) for joint in graph.joint}
        self._after: dict[str, DemandSamples] = {}
        self._refined: dict[tuple[object, ...], DemandSamples] = {}
        self._next: dict[tuple[str, bool], dict[str, tuple[float, Array]]] = {}

    @cached_property
    def prior(self) -> DemandSamples:
        """The demand of a whole run before any of its calls is known."""
        start = np.array(self.graph.start, dtype=object)  # text of a fixed width would cut longer names
        return self._walk(self._random.choice(start, self.walks))

    def has(self, unit: str) -> bool:
        """Return whether the graph has this unit."""
        return unit in self._units

    def after(self, unit: str) -> DemandSamples:
        """Return the demand after a call of `unit`."""
        if unit not in self._after:
            self._after[unit] = self._walk(self._random.choice(self._units[unit].nexts, self.walks))
        return self._after[unit]

    def refined(self, unit: str, seen: Seen | None) -> DemandSamples:
        """Return the demand of a call of `unit` and of everything after it.

        `seen` is the run's last LLM call before it. The next LLM call is drawn from the joint records that match
        `seen`; later calls are drawn from all samples.
        """
        key = (unit, self._buckets(unit, seen))
        if key not in self._refined:
            self._refined[key] = self._call(unit, seen).plus(self._follow(unit, seen))
        return self._refined[key]

    def next_calls(self, unit: str, begun: bool) -> dict[str, tuple[float, Array]]:
        """Return the LLM units whose call may come next after a call of `unit`, with calls of other backends between.

        Each has its probability, and samples of the seconds until it comes: from the beginning of the call of `unit`
        if it has just `begun`, else from its end.
        """
        if (unit, begun) not in self._next:
            seconds = self._units[unit].draw(self._random, self.walks).longest_s if begun else np.zeros(self.walks)
            names = self._random.choice(self._units[unit].nexts, self.walks)
            for _ in range(MOST_HOPS):
                others = [n for n in sorted(set(names.tolist()) - {END}) if self._units[n].unit.backend != LLM]
                if not others:
                    break
                following = names.copy()
                for name in others:
                    at = np.flatnonzero(names == name)
                    seconds[at] += self._units[name].draw(self._random, len(at)).longest_s
                    following[at] = self._random.choice(self._units[name].nexts, len(at))
                names = following
            found = [name for name in sorted(set(names.tolist()) - {END}) if self._units[name].unit.backend == LLM]
            self._next[unit, begun] = {n: (float((names == n).mean()), seconds[names == n]) for n in found}
        return self._next[unit, begun]

    def next_probability(self, unit: str, following: str) -> float:
        """Return the share of `unit`'s calls that are followed directly by `following`."""
        nexts = self._units[unit].unit.next_units
        return nexts.count(following) / len(nexts)

    def seconds(self, unit: str) -> Array:
        """Return a call's own seconds, each sample once; for parallel requests the longest."""
        return self._units[unit].longest_s

    def _buckets(self, unit: str, seen: Seen | None) -> tuple[object, ...]:
        """Return the part of `seen` that changes the demand."""
        if seen is None:
            return ()
        nexts = [unit] if self._units[unit].unit.backend == LLM else sorted(set(self._units[unit].unit.next_units))
        pairs = [self._pairs[seen.unit, name] for name in nexts if (seen.unit, name) in self._pairs]
        return (seen.unit, *(pair.buckets(seen) for pair in pairs))

    def _call(self, unit: str, seen: Seen | None) -> DemandSamples:
        """Return the demand of a call of `unit` alone."""
        samples = self._units[unit]
        pair = self._pairs.get((seen.unit, unit)) if seen else None
        if seen is None or pair is None or samples.unit.backend != LLM:
            return samples.draw(self._random, self.walks)
        inputs, outputs, parallel = pair.draw(seen, samples.unit, self._random, self.walks)
        longest = inputs * self.rates.prefill_s + outputs * self.rates.decode_s
        return DemandSamples(longest * parallel, longest)

    def _follow(self, unit: str, seen: Seen | None) -> DemandSamples:
        """Return the demand after a call of `unit`.

        An LLM call directly after another backend's call is drawn by `seen`.
        """
        if seen is None or self._units[unit].unit.backend == LLM:
            after = self.after(unit)
            order = self._random.permutation(self.walks)
            return DemandSamples(after.total_s[order], after.longest_s[order])
        nexts = self._random.choice(self._units[unit].nexts, self.walks)
        total_s, longest_s = np.zeros(self.walks), np.zeros(self.walks)
        for name in sorted(set(nexts.tolist()) - {END}):
            behind = self._call(name, seen).plus(self.after(name))
            chosen = nexts == name
            total_s[chosen], longest_s[chosen] = behind.total_s[chosen], behind.longest_s[chosen]
        return DemandSamples(total_s, longest_s)

    def _walk(self, units: NDArray[np.object_]) -> DemandSamples:
        """Return the demand of walks from `units`, names [walks], to the end, or for MOST_HOPS calls."""
        total_s, longest_s = np.zeros(len(units)), np.zeros(len(units))
        for _ in range(MOST_HOPS):
            if (units == END).all():
                break
            following = units.copy()
            for name in sorted(set(units.tolist()) - {END}):  # sorted: sets of text differ from process to process
                at = np.flatnonzero(units == name)
                demand = self._units[name].draw(self._random, len(at))
                total_s[at] += demand.total_s
                longest_s[at] += demand.longest_s
                following[at] = self._random.choice(self._units[name].nexts, len(at))
            units = following
        return DemandSamples(total_s, longest_s)


class _Samples:
    """A unit's samples as arrays."""

    def __init__(self, unit: DemandStep, rates: ServiceRates):
        self.unit = unit
        self.nexts = np.array(unit.next_units, dtype=object)
        if unit.backend == LLM:
            inputs, outputs = (np.array(tokens, np.float64) for tokens in (unit.input_tokens, unit.output_tokens))
            self.longest_s = inputs * rates.prefill_s + outputs * rates.decode_s
            self.total_s = self.longest_s * np.array(unit.parallel, np.float64)
        else:
            self.longest_s = self.total_s = np.array(unit.seconds, np.float64)

    def draw(self, random: np.random.Generator, count: int) -> DemandSamples:
        """Draw `count` calls as whole records, so that a call's own tokens stay together."""
        rows = random.integers(0, len(self.total_s), count)
        return DemandSamples(self.total_s[rows], self.longest_s[rows])


_UP = {"input": 0, "output": 1, "parallel": 2}
_DOWN = {"input": 3, "output": 4, "parallel": 5}
EDGES = (("input", "input"), ("input", "output"), ("output", "output"), ("parallel", "parallel"))
"""(variable, upstream variable that may predict it); an output may depend on its own input, too."""


class Correlations:
    """The variables of a call that predict the next LLM call, and draws of that call."""

    def __init__(self, joint: JointRecords):
        self.records = np.array(joint.records, np.float64)
        lowest, width = self.records.min(axis=0), np.ptp(self.records, axis=0)
        self._lowest, self._width = lowest, np.where(width > 0, width, 1.0)
        self._bucket = self._bucket_of(self.records)
        columns = {(v, up): (_DOWN[v], _UP[up]) for v, up in EDGES} | {("output", "own input"): (4, 3)}
        self.rho = {edge: _pearson(*(self.records[:, column] for column in pair)) for edge, pair in columns.items()}
        """Pearson's coefficient of each edge; 0 where a variable never varies."""

    @property
    def mask(self) -> frozenset[tuple[str, str]]:
        """The edges that are correlated enough to count."""
        return frozenset(edge for edge, rho in self.rho.items() if rho > LEAST_CORRELATION)

    def buckets(self, seen: Seen) -> tuple[int, int, int]:
        """Return the buckets of the upstream variables; 0 for variables that predict nothing."""
        row = np.array([seen.input_tokens, seen.output_tokens, seen.parallel, 0, 0, 0], np.float64)
        telling = {up for _, up in self.mask}
        buckets = self._bucket_of(row)
        i, o, p = (int(buckets[_UP[up]]) if up in telling else 0 for up in _UP)
        return i, o, p

    def draw(self, seen: Seen, unit: DemandStep, random: np.random.Generator, count: int) -> tuple[Array, Array, Array]:
        """Return input tokens, output tokens and parallel requests of `count` calls of `unit`, float64 [count] each."""
        at = dict(zip(_UP, self._bucket_of(np.array([*seen[1:], 0, 0, 0], np.float64))[:3], strict=True))
        inputs = random.choice(self._matching("input", at, unit.input_tokens), count)
        parallel = random.choice(self._matching("parallel", at, unit.parallel), count)
        if ("output", "own input") not in self.mask:
            return inputs, random.choice(self._matching("output", at, unit.output_tokens), count), parallel
        outputs = np.empty(count)
        own = np.clip((inputs - self._lowest[3]) / self._width[3] * BUCKETS, 0, BUCKETS - 1).astype(int)
        for bucket in np.unique(own):
            rows = own == bucket
            matching = self._matching("output", {**at, "own input": bucket}, unit.output_tokens)
            outputs[rows] = random.choice(matching, int(rows.sum()))
        return inputs, outputs, parallel

    def _matching(self, variable: str, at: dict[str, int], prior: Sequence[int]) -> Array:
        """Return the variable's values in the records that match all of its predictors.

        If these are fewer than LEAST_RECORDS, take the records that match the best predictor, else the next one; else
        the unit's samples.
        """
        telling = sorted((edge for edge in self.mask if edge[0] == variable), key=lambda edge: -self.rho[edge])
        matches = [self._bucket[:, _UP.get(up, 3)] == at[up] for _, up in telling if up in at]
        joint = [np.logical_and.reduce(matches)] if len(matches) > 1 else []
        for rows in (*joint, *matches):
            if rows.sum() >= LEAST_RECORDS:
                matching: Array = self.records[rows, _DOWN[variable]]
                return matching
        return np.array(prior, np.float64)

    def _bucket_of(self, rows: Array) -> Places:
        """Return bucket numbers, int [..., 6]; values outside the range are in the outermost buckets."""
        buckets: Places = np.clip((rows - self._lowest) / self._width * BUCKETS, 0, BUCKETS - 1).astype(int)
        return buckets


def _pearson(x: Array, y: Array) -> float:
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])
