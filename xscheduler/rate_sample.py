"""Arrivals: the requests with which an arrival rate is tested, and the part of them that each replica serves."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from xcore.arrays import Array, Places
from xcore.batching import deal
from xcore.batching.admission import most_cached
from xcore.errors import InputError
from xcore.specs.bound import OF_LONGEST, BoundMeaning
from xcore.specs.copula import Copula
from xcore.specs.prefix_hit import found_tokens
from xcore.specs.request_times import long_outputs
from xcore.specs.schedule import BLOCK_SIZE
from xcore.specs.workload import LengthDistribution, RequestLengths, Workload
from xcore.traces.prefixes import Prefixes
from xsimulator.replay.compiled import COUNTS, COUNTS_FOR_LATENCY, RequestArrays

if TYPE_CHECKING:
    from xscheduler.settings import Setting


REQUESTS = 200_000
"""Requests with which a goodput is measured.

The 99th percentile of waiting depends on rare bursts. From seed to seed, goodputs measured with 3,000 requests differ
by 4 % (standard deviation), and with 200,000 requests by about 0.5 to 1 %.
"""
EACH = 2000
"""Minimum number of requests for one replica: far more than it serves at a time."""
WARM_UP = 0.1
"""Share of the first requests, which are not counted because they find the system emptier than later requests do."""
BATCHES = 40
"""Number of consecutive parts of the requests, whose misses give the standard error of the sum of misses."""


_SAMPLING = Lock()
"""Several threads replay policies and use the same samples."""


def may_miss(count: int, quantile: float) -> int:
    """Return how many of `count` requests may exceed a bound that their `quantile`, interpolated linearly, meets."""
    return max(0, count - int(quantile * (count - 1)) - 2)


@dataclass(frozen=True)
class Sample:
    """Requests at one per second on average, distributed to replicas; only the first few replicas are followed."""

    replicas: tuple[RequestArrays, ...]
    """The requests of each followed replica."""
    allowed: Array
    """[3]: how many of the counted requests may miss the bounds on first token, time per output token and latency."""

    @property
    def count(self) -> int:
        """The number of followed requests."""
        return sum(len(replica.arrivals) for replica in self.replicas)


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Requests in order of arrival, which can be scaled to any rate; arrays [n]."""

    inputs: Array
    outputs: Array
    times: Array
    """Arrival times in any unit; only their ratios matter."""
    random: bool
    """Whether another seed would give other arrivals: the measured figures are then uncertain."""
    prefixes: Prefixes | None = None
    """The shared prefixes of the prompts; None: no shared prefixes."""
    warm: Array | None = None
    """Tokens of each prompt from the one text that all begin with, as in `prefixes`; None: there is no such text."""
    _samples: dict[object, Sample] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """The number of requests."""
        return len(self.times)

    @property
    def most_blocks(self) -> int:
        """KV blocks of the longest request of a decoder-only model."""
        return -(-int(most_cached(self.inputs, self.outputs, False).max()) // BLOCK_SIZE)

    @staticmethod
    def poisson(
        workload: Workload, context: int | None, seed: int = 0, devices: int = 1, count: int = REQUESTS
    ) -> "Arrivals":
        """Return requests of the workload that arrive independently.

        There are `count` requests, or enough for as many replicas as `devices`.
        """
        many, prefixes = max(count, EACH * devices) if count >= EACH else count, None
        lengths, gaps = (np.random.default_rng([seed, stream]) for stream in (0, 1))
        if workload.requests:
            inputs, outputs = _columns(workload.requests)
            inputs, outputs = np.resize(inputs, many), np.resize(outputs, many)
            alike = Prefixes.of(workload.requests, BLOCK_SIZE)
            prefixes = alike and alike.repeated(many)
        else:
            inputs, outputs = (each.astype(np.float64) for each in workload.sample(many, lengths))
        times = np.cumsum(gaps.exponential(size=many))
        inputs, outputs = _clipped(inputs, outputs, context)
        warm = found_tokens(inputs, workload.prefix_hit) if workload.prefix_hit else None
        if warm is not None:
            prefixes = Prefixes.of_one_text(warm)
        return Arrivals(inputs, outputs, times - times[0], True, prefixes, warm)

    @staticmethod
    def traced(workload: Workload, context: int | None) -> "Arrivals":
        """Return the first requests of the workload's list in their original arrival pattern (bursts and lulls).

        The list must have arrivals. Raises InputError if its first requests arrive all at once.
        """
        assert workload.requests
        first = sorted(workload.requests, key=lambda r: r.arrival_s)[:REQUESTS]
        times = np.array([r.arrival_s for r in first])
        if times[-1] <= times[0]:
            raise InputError(
                f"The first {len(first)} requests all arrive at the same time: pass --rate for Poisson arrivals."
            )
        prefixes = Prefixes.of(first, BLOCK_SIZE)
        inputs, outputs = _clipped(*_columns(first), context)
        warm = found_tokens(inputs, workload.prefix_hit) if workload.prefix_hit else None
        return Arrivals(inputs, outputs, times - times[0], False, prefixes, warm)

    def computed(self, workload: Workload) -> Workload:
        """Return a workload whose prompts have only the tokens that an unlimited prefix cache lacks.

        The steady state of this workload is never slower than that with a real cache.
        """
        found = self.prefixes.found(self.inputs, BLOCK_SIZE) if self.prefixes else 0.0
        computed = (self.inputs - found).astype(np.int64)
        lengths = LengthDistribution.from_samples(computed)
        outputs = self.outputs.astype(np.int64)
        copula = Copula.of(computed, outputs, lengths, LengthDistribution.from_samples(outputs))
        return replace(workload, input=lengths, requests=None, prefix_hit=0.0, copula=copula)

    def requests(self, rate: float, count: int | None = None) -> list[RequestLengths]:
        """Return the first `count` requests at `rate` per second, for a replay."""
        many = count or self.count
        times = self._stretched(many) / rate
        columns = zip(self.inputs[:many], self.outputs[:many], times, strict=True)
        return [RequestLengths(int(i), int(o), float(t)) for i, o, t in columns]

    def _stretched(self, count: int) -> Array:
        """Return the first arrivals, scaled to one per second on average.

        Without scaling, the rate of a few thousand random arrivals is off by several percent.
        """
        times = self.times[:count]
        stretched: Array = times * ((count - 1) / times[-1]) if times[-1] > 0 else times
        return stretched

    def sample(self, count: int, replicas: int, bound: BoundMeaning) -> Sample:
        """Return about the first `count` requests, distributed to replicas.

        Only the first few of many replicas are simulated: all are equivalent, and each must be observed for long
        enough.
        """
        key = (count, replicas, bound)
        with _SAMPLING:
            if key not in self._samples:
                self._samples[key] = self._sampled(count, replicas, bound)
        return self._samples[key]

    def _sampled(self, count: int, replicas: int, bound: BoundMeaning) -> Sample:
        many = min(self.count, max(count, min(EACH, count) * replicas))
        dealt: Sequence[Sequence[int]] = [range(many)]
        if replicas > 1:
            columns = (column[:many].astype(int).tolist() for column in (self.inputs, self.outputs))
            dealt = deal(list(zip(*columns, strict=True)), replicas)
        followed: list[Places] = []
        for places in dealt:
            if places and (not self.random or sum(map(len, followed)) < min(count, many)):
                followed.append(np.array(places, dtype=np.intp))
        times, first = self._stretched(many), round(WARM_UP * many)
        all_places = np.concatenate(followed)
        kept = all_places >= first
        late = kept.copy()
        if bound.of_length:
            late[kept] = long_outputs(self.outputs[all_places[kept]])
        flags = np.zeros(many)
        flags[all_places] = COUNTS * kept + COUNTS_FOR_LATENCY * late
        several = int((kept & (self.outputs[all_places] > 1)).sum())
        allowed = [
            may_miss(int(kept.sum()), bound.share),
            may_miss(several, bound.share),
            may_miss(int(late.sum()), OF_LONGEST if bound.of_length else bound.share),
        ]
        requests = tuple(
            RequestArrays(
                *(times[p], self.inputs[p], self.outputs[p], flags[p]),
                self.prefixes and self.prefixes.take(p),
                warm=None if self.warm is None else self.warm[p],
            )
            for p in followed
        )
        return Sample(requests, np.array(allowed, dtype=np.float64))


def _columns(requests: Sequence[RequestLengths]) -> tuple[Array, Array]:
    columns = np.array([(r.input, r.output) for r in requests], dtype=np.float64)
    inputs, outputs = np.ascontiguousarray(columns.T)
    return inputs, outputs


def _clipped(inputs: Array, outputs: Array, context: int | None) -> tuple[Array, Array]:
    """Return the lengths clipped to `context` tokens, as `RequestLengths.clipped` does."""
    if context is None:
        return inputs, outputs
    fits = inputs + outputs <= context
    inputs = np.where(fits, inputs, np.minimum(inputs, context - 1))
    return inputs, np.where(fits, outputs, np.clip(outputs, 1, context - inputs))


def at(requests: RequestArrays, rate: float) -> RequestArrays:
    """Scale requests at one per second to `rate` per second."""
    return replace(requests, arrivals=requests.arrivals / rate)


def arrivals_of(setting: "Setting", pattern: str, seed: int) -> Arrivals:
    """Return the arrivals of a pattern: `poisson`, or `trace` for the recorded arrivals."""
    workload, longest = setting.workload, setting.model.longest_request
    if pattern == "poisson":
        return Arrivals.poisson(workload, longest, seed, setting.cluster.devices)
    if not workload.requests or max(r.arrival_s for r in workload.requests) <= 0:
        raise InputError(f"Workload {workload.name} has no arrivals: use a trace with an arrival column.")
    return Arrivals.traced(workload, longest)
