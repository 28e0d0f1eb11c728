"""Workload: lengths of inputs and outputs (paper section 2; S_E and S_D), and arrivals."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xcore.arrays import Array, Integers
from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.copula import Copula, at_ranks
from xcore.traces.prompt_identity import PromptIdentity

MAX_TOKENS = 10_000_000
"""Most tokens of a request; more are probably a mistake."""


@dataclass(frozen=True)
class LengthDistribution(Spec):
    """A distribution over lengths in tokens.

    It has `lengths` (increasing, at least 1) with their `probabilities` (summing to 1).
    """

    lengths: tuple[int, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.probabilities):
            raise InputError(
                f"A length distribution needs as many probabilities as lengths, and at least one "
                f"(got {len(self.probabilities)} and {len(self.lengths)})."
            )
        if not 1 <= self.lengths[0] <= self.lengths[-1] <= MAX_TOKENS or (np.diff(self.s) <= 0).any():
            raise InputError(f"The lengths of a distribution must increase, and be from 1 to {MAX_TOKENS:,}.")
        if not (self.p >= 0).all() or not math.isclose(self.p.sum(), 1.0, abs_tol=1e-6):
            raise InputError(f"Probabilities must be positive and sum to 1 (they sum to {self.p.sum():.6g}).")

    @functools.cached_property
    def s(self) -> Array:
        """Return the lengths as an array, float64 [n]."""
        return np.asarray(self.lengths, dtype=np.float64)

    @functools.cached_property
    def p(self) -> Array:
        """Return the probabilities as an array, float64 [n]."""
        return np.asarray(self.probabilities, dtype=np.float64)

    @functools.cached_property
    def mean(self) -> float:
        """Return the expected length in tokens."""
        return float(self.s @ self.p)

    @functools.cached_property
    def std(self) -> float:
        """Return the standard deviation of the length in tokens."""
        return math.sqrt(max(0.0, float(self.s**2 @ self.p) - self.mean**2))

    @property
    def max(self) -> int:
        """Return the greatest length."""
        return self.lengths[-1]

    def quantile(self, q: float) -> int:
        """Return the smallest length whose cumulative probability is at least `q`."""
        index = int(np.searchsorted(np.cumsum(self.p), q - 1e-12))
        return self.lengths[min(index, len(self.lengths) - 1)]

    def sample(self, n: int, rng: np.random.Generator) -> Integers:
        """Draw `n` independent lengths, int64 [n]."""
        return rng.choice(np.asarray(self.lengths, dtype=np.int64), size=n, p=self.p / self.p.sum())

    def scaled(self, factor: float) -> "LengthDistribution":
        """Multiply every length by `factor`, rounded, at least 1."""
        scaled = np.maximum(1, np.rint(self.s * factor)).astype(np.int64)
        return LengthDistribution._collect(scaled, self.p)

    @staticmethod
    def _collect(lengths: Integers, weights: Array) -> "LengthDistribution":
        unique, inverse = np.unique(lengths, return_inverse=True)
        p = np.bincount(inverse, weights=weights)
        return LengthDistribution(tuple(unique.tolist()), tuple((p / p.sum()).tolist()))

    @staticmethod
    def fixed(length: int) -> "LengthDistribution":
        """Return the distribution of one length."""
        return LengthDistribution((length,), (1.0,))

    @staticmethod
    def from_samples(samples: Iterable[int] | Integers) -> "LengthDistribution":
        """Return the empirical distribution of observed lengths."""
        values = np.asarray(list(samples) if not isinstance(samples, np.ndarray) else samples, dtype=np.int64)
        return LengthDistribution._collect(values, np.ones(len(values)))

    @staticmethod
    def truncated_normal(mean: float, std: float, max: int, fit: bool = True) -> "LengthDistribution":
        """Return a normal distribution truncated to (0, max], in whole tokens: P(s) is the normal's weight in (s-1, s].

        With `fit`, the parent's moments are chosen so that the discrete distribution has the given mean and deviation.
        If no truncated normal has them, or without `fit`, `mean` and `std` are the parent's (docs/theory.md).
        """
        parent = _fit_parent(mean, std, max) if fit else None
        s, p = _discrete_normal(*(parent or (mean, std)), max)
        keep = p > 1e-15
        return LengthDistribution._collect(s[keep], p[keep])


def _discrete_normal(mean: float, std: float, most: int) -> tuple[Integers, Array]:
    from scipy.special import ndtr

    edges = ndtr((np.arange(most + 1) - mean) / std)
    p = np.diff(edges)
    return np.arange(1, most + 1, dtype=np.int64), p / p.sum()


def _fit_parent(mean: float, std: float, most: int) -> tuple[float, float] | None:
    """Return the mean and deviation of the parent normal whose discrete truncation has these moments, or None."""
    from scipy.optimize import least_squares

    def miss(x: Array) -> Array:
        s, p = _discrete_normal(x[0], math.exp(x[1]), most)
        m = float(s @ p)
        return np.array([m - mean, math.sqrt(max(float(s**2 @ p) - m * m, 0.0)) - std])

    bounds = ([-20.0 * most, -5.0], [20.0 * most, math.log(20.0 * most)])
    fit = least_squares(miss, [mean, math.log(std)], bounds=bounds, xtol=1e-14, ftol=1e-14, gtol=1e-14)
    if np.abs(fit.fun).max() > 1e-3:
        return None
    return float(fit.x[0]), math.exp(fit.x[1])


@dataclass(frozen=True)
class RequestLengths(Spec):
    """One request of a trace: input tokens, output tokens, and its arrival in seconds since the first."""

    input: int
    output: int
    arrival_s: float = 0.0
    identity: PromptIdentity | None = None
    """Identity of its prompt's tokens, as far as known, for prefix caching."""

    def fits(self, longest: int | None) -> bool:
        """Return whether input and output are at most `longest` tokens; None: any number fits."""
        return longest is None or self.input + self.output <= longest

    def clipped(self, context: int) -> "RequestLengths":
        """Clip this request to `context` tokens, the output first; at least one token each."""
        if self.fits(context):
            return self
        input = min(self.input, context - 1)
        return replace(self, input=input, output=max(1, min(self.output, context - input)))

    def scaled(self, factor: float) -> "RequestLengths":
        """Multiply both lengths by a factor, rounded, at least 1."""
        if factor == 1.0:
            return self
        lengths = {name: max(1, round(getattr(self, name) * factor)) for name in ("input", "output")}
        return replace(self, **lengths, identity=self.identity and self.identity.scaled(factor))


@dataclass(frozen=True)
class Workload(Spec):
    """The distributions of input and output lengths and, if known, the requests themselves and their rate of arrival.

    `requests` keeps the pairs for a replay, and `copula` their dependence for the analysis.
    """

    name: str
    input: LengthDistribution
    output: LengthDistribution
    p99_output: int
    """The output length that the default bound's latency is about (docs/theory.md)."""
    arrival_rate: float | None = None
    """Requests per second; None: as many as can be served."""
    requests: tuple[RequestLengths, ...] | None = None
    prefix_hit: float = 0.0
    """Share of the prompts' tokens that a prefix cache has, as `prefix_hit.py` defines it; 0: as the requests say."""
    copula: Copula | None = None
    """How input and output depend on each other; None: they are independent."""

    def __post_init__(self) -> None:
        if not 0 <= self.prefix_hit < 1:
            raise InputError(
                f"Workload '{self.name}' has prefix_hit = {self.prefix_hit}: it must be from 0 to below 1."
            )
        if not 1 <= self.p99_output <= MAX_TOKENS:
            raise InputError(
                f"Workload '{self.name}' has p99_output = {self.p99_output}: it must be a length in tokens."
            )
        if self.arrival_rate is not None and not 0 < self.arrival_rate < math.inf:
            raise InputError(f"Workload '{self.name}' has the arrival rate {self.arrival_rate}: it must be above 0.")

    @staticmethod
    def parse(text: str) -> "Workload":
        """Parse a task of the ExeGPT paper, fixed lengths (`2048/256`) or a trace file; InputError for other text."""
        from xcore.traces.trace import parse_workload

        return parse_workload(text)

    @property
    def without_requests(self) -> "Workload":
        """Return this workload without its request list, as a schedule file holds it."""
        return replace(self, requests=None)

    @functools.cached_property
    def mean_tokens(self) -> float:
        """Return the mean of input and output tokens together."""
        return self.input.mean + self.output.mean

    def with_outputs(self, outputs: LengthDistribution) -> "Workload":
        """Return this workload with other output lengths, without its request list and what that says of pairs."""
        return replace(self, output=outputs, p99_output=outputs.quantile(0.99), requests=None, copula=None)

    @functools.cached_property
    def correlation(self) -> float | None:
        """Return Pearson's correlation of input and output length over the request list; None without a list."""
        if not self.requests or len(self.requests) < 2:
            return None
        pairs = np.array([(r.input, r.output) for r in self.requests], dtype=np.float64)
        if pairs.std(axis=0).min() == 0:
            return None
        return float(np.corrcoef(pairs.T)[0, 1])

    @functools.cached_property
    def input_moments(self) -> Array:
        """Return [3, outputs]: the mean of S_E, S_E² and S_E³ of requests with each output length."""
        if self.copula:
            return self.copula.input_moments(self.input, self.output)
        powers = np.stack([self.input.s, self.input.s**2, self.input.s**3]) @ self.input.p
        return np.repeat(powers[:, None], len(self.output.lengths), axis=1)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
        """Draw the inputs and outputs of `n` requests from the distributions, [n] each."""
        if not self.copula:
            return self.input.sample(n, rng), self.output.sample(n, rng)
        ranks = rng.random(n)
        outputs = at_ranks(self.output, self.copula.output_ranks(ranks, rng))
        return at_ranks(self.input, ranks).astype(np.int64), outputs.astype(np.int64)

    def draw(self, n: int, seed: int = 0, context: int | None = None) -> tuple[RequestLengths, ...]:
        """Draw `n` requests: from the list if there is one (in order, repeated), else from the distributions.

        With `context`, a request that is longer is clipped to it, the output first.
        """
        if self.requests:
            rows = tuple(self.requests[i % len(self.requests)] for i in range(n))
        else:
            inputs, outputs = self.sample(n, np.random.default_rng(seed))
            rows = tuple(RequestLengths(int(i), int(o)) for i, o in zip(inputs, outputs, strict=True))
            if self.prefix_hit:
                from xcore.specs.prefix_hit import identified

                rows = identified(rows, self.prefix_hit)
        return rows if context is None else tuple(r.clipped(context) for r in rows)

    @staticmethod
    def from_requests(name: str, requests: Iterable[RequestLengths]) -> "Workload":
        """Build the empirical workload of a list of requests."""
        rows = tuple(requests)
        if not rows:
            raise InputError(f"Workload '{name}' has no requests.")
        inputs, outputs = ([getattr(row, name) for row in rows] for name in ("input", "output"))
        input, output = LengthDistribution.from_samples(inputs), LengthDistribution.from_samples(outputs)
        return Workload(
            name=name,
            input=input,
            output=output,
            p99_output=output.quantile(0.99),
            arrival_rate=_rate_of(rows),
            requests=rows,
            copula=Copula.of(inputs, outputs, input, output),
        )

    @staticmethod
    def fixed(input: int, output: int) -> "Workload":
        """Build a workload of equal requests, as in `2048/256`."""
        return Workload(f"{input}/{output}", LengthDistribution.fixed(input), LengthDistribution.fixed(output), output)

    def within(self, context: int) -> "Workload | None":
        """Return the workload without listed requests of more than `context` tokens; None if none is left.

        An arrival rate that isn't derived from the list stays the same.
        """
        assert self.requests is not None, "a distribution has no rows to leave out"
        rows = tuple(row for row in self.requests if row.fits(context))
        if not rows:
            return None
        left = replace(Workload.from_requests(self.name, rows), prefix_hit=self.prefix_hit)
        return left if self.arrival_rate == _rate_of(self.requests) else replace(left, arrival_rate=self.arrival_rate)

    def scaled_to(self, context: int) -> tuple["Workload", float, float]:
        """Scale every length by one factor, so that the 99th percentile of input + output fits `context` tokens.

        The factor is at most 1.

        Returns:
            The workload, the factor, and the share of requests that are still longer. Those of a list are clipped here;
            those from distributions are clipped when they are drawn.
        """
        factor = min(1.0, context / self._total_quantile(0.99))
        if not self.requests:
            input, output = self.input.scaled(factor), self.output.scaled(factor)
            p99 = max(1, round(self.p99_output * factor))
            scaled = replace(self, input=input, output=output, p99_output=p99)
            return scaled, factor, float(scaled._total_lengths()[context + 1 :].sum())
        rows = [request.scaled(factor) for request in self.requests]
        clipped = [r.clipped(context) for r in rows]
        scaled = Workload.from_requests(self.name, clipped)
        scaled = replace(scaled, arrival_rate=self.arrival_rate, prefix_hit=self.prefix_hit)
        return scaled, factor, sum(a != b for a, b in zip(rows, clipped, strict=True)) / len(rows)

    def _total_lengths(self) -> Array:
        """Return the probability of each input + output, 0 first, as if the two were independent."""
        a, b = np.zeros(self.input.max + 1), np.zeros(self.output.max + 1)
        a[np.asarray(self.input.lengths)] = self.input.p
        b[np.asarray(self.output.lengths)] = self.output.p
        size = len(a) + len(b) - 1
        n = 1 << size.bit_length()
        return np.fft.irfft(np.fft.rfft(a, n) * np.fft.rfft(b, n), n)[:size]

    def _total_quantile(self, q: float) -> float:
        """Return the `q` quantile of input + output."""
        if self.requests:
            return float(np.quantile([r.input + r.output for r in self.requests], q))
        return float(np.searchsorted(np.cumsum(self._total_lengths()), q))


def _rate_of(requests: Sequence[RequestLengths]) -> float | None:
    """Return the requests per second of a list; None if all arrive at once."""
    arrivals = [request.arrival_s for request in requests]
    span = max(arrivals) - min(arrivals)
    rate = (len(arrivals) - 1) / span if span > 0 else math.inf  # a span may be too short for a number
    return rate if 0 < rate < math.inf else None


_TASKS = {  # paper, Table 3: input mean, std, max; output mean, std, 99th percentile, max
    "S": ("summarization", (256, 252, 512), (32, 13, 63, 80)),
    "T": ("translation", (128, 81, 256), (128, 68, 292, 320)),
    "G": ("code generation", (64, 23, 128), (192, 93, 417, 480)),
    "C1": ("conversation, short", (256, 115, 512), (64, 30, 137, 160)),
    "C2": ("conversation, long", (512, 252, 1024), (256, 134, 579, 640)),
}

TASKS = {name: title for name, (title, _, _) in _TASKS.items()}
"""The paper's five tasks (Table 3): identifier → title."""


@functools.cache
def task(name: str) -> Workload:
    """Return one of the paper's five tasks; InputError for any other name."""
    if name not in _TASKS:
        raise InputError(f"There is no task '{name}': the tasks are {', '.join(_TASKS)}.")
    _, (input_mean, input_std, input_max), (mean, std, p99, most) = _TASKS[name]
    return Workload(
        name=name,
        input=LengthDistribution.truncated_normal(input_mean, input_std, input_max),
        output=LengthDistribution.truncated_normal(mean, std, most),
        p99_output=p99,
    )
