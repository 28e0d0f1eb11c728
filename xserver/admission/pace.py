"""Pace: an engine's speed at each load, predicted and measured.

Sequences share the engine: with n of them, each gets its next token t(n) seconds after the last one. The engine's work
is the tokens that a sequence should have received meanwhile. The ratio of work to received tokens is the slowdown
against the prediction at any load. It is learned by load, in octaves.

t(n) includes the prefills of the sequences that come meanwhile, at the steady rate, of whole prompts. Cached prefixes
save a part of them: the mean saving of recent sequences is taken out of t(n), so that the saving of an accepted
sequence isn't counted twice. The work is measured without prefills, since a burst brings them at another rate: the
predicted time of completed prefills is subtracted, and the rest of the time counts at the pace of decoding alone.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar

import numpy as np

import xsimulator
from xcore.arrays import Array
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.cost.stage import Chunks
from xsimulator.replay.continuation import Standing, continue_from
from xsimulator.replay.replica import micro_batching_of

T = TypeVar("T", float, Array)
LoadPoint = tuple[float, float, float, float]
"""Sequences that share an engine; seconds from a start to the first token, per further token, and without prefills."""

_MEMORY = 0.05
"""Weight of the latest measured service in the running scale."""
_SCALES = 0.5, 3.0
"""Limits of the scale: a machine whose speed differs more needs another schedule."""
_MOST_BUSY = 0.95
"""Maximum share of the time that prefills take: where they are predicted to delay more, no share would be left."""
_LEAST_S = 0.05
"""Minimum time between two marks of the work."""
_SHARE_WITHIN = 4.0
"""Tokens of a loaded engine for whose time the share of prefills is remembered."""
_WAITING = 64
"""Number of waiting sequences from which the time of joint prefills is predicted."""
_MARKS = 8192
"""Number of marks kept: at least seven minutes."""


class Pace:
    """The pace of one engine, beginning at the time `now_s` of the monotonic clock."""

    def __init__(
        self,
        schedule: Schedule,
        cost: ReplicaCost,
        profile: Profile,
        now_s: float,
        points: Sequence[LoadPoint] | None = None,
    ):
        """Predict the pace from points in order of load; None: from the schedule's steady states."""
        if points is None:
            most = schedule.control.batch or 1
            batches = sorted({*(2**i for i in range(most.bit_length())), most})
            points = sorted(_steady(_filled(schedule, batch), cost, profile) for batch in batches)
        self._loads, *seconds, decode_s = (np.array(values) for values in zip(*points, strict=True))
        first_s, token_s = (np.maximum.accumulate(values) for values in seconds)
        self._cost, self._input = cost, round(schedule.workload.input.mean)
        self._input_s = self.prefill_s(self._input, 0)
        mean, self._mixed, self._replicas = schedule.workload.output.mean, schedule.traits.mixed, schedule.replicas
        self._context, self._at_once = self._input + mean / 2, _batches_at_once(schedule)
        rates = self._loads / schedule.replicas / (first_s + (mean - 1) * token_s)
        alone_s = np.minimum(decode_s, token_s)
        delays_s = (1 - alone_s / token_s) / rates
        if self._mixed:
            delays_s = np.maximum(delays_s, [self._mixed_s([(self._input, 0)], load) for load in self._loads])
        whole = np.arange(math.ceil(self._loads[-1]) + 1)
        columns = token_s, alone_s, rates, delays_s
        self._columns = np.array([np.interp(whole, self._loads, values) for values in columns])
        """By whole load: seconds per token, and without any prefill; sequences per second of a replica; and the seconds
        by which the prefill of a mean prompt delays the others' tokens."""
        self._rows: list[list[float]] = self._columns.T.tolist()
        self._first_s: list[float] = np.interp(whole, self._loads, first_s).tolist()
        prompts = [Standing(self._input, 1, 1)] * _WAITING
        ran = continue_from(schedule, cost, prompts, math.inf)
        self._joint_s = max(c.finish_s or 0.0 for c in ran) / len(ran)
        self._begun: list[tuple[int, int]] = []
        """The prefills that have ended since the last record of the load: computed tokens, and cached ones."""
        self._pipelined = self._mixed and len(cost.encode.costs) > 1
        self._prefill_share, self._share_within_s = 0.0, _SHARE_WITHIN * float(token_s[-1])
        """The recent share of a stage's time that prefills take, and the seconds for which it is remembered."""
        self._saved = 0.0
        """The mean share of a prefill that recent sequences have saved."""
        self._scales: dict[int, float] = {}
        self._s, self._work, self._load_s = [now_s], [0.0], [0.0]
        """Marks: the time, the work until then, and the integral of the load."""
        self._load = 0
        self.others_s = 0.0
        """Predicted seconds per token that other models on the same devices take."""

    # ---- predictions ----

    def first_s(self, load: float) -> float:
        """Return the seconds from a sequence's start to its first token at this load."""
        return self.scale(load) * self._first_s[min(math.ceil(load), len(self._first_s) - 1)]

    def joint_prefill_s(self) -> float:
        """Return the seconds per prefill while many sequences wait for theirs: an iteration may have several."""
        return self.scale(1) * self._joint_s

    def token_s(self, load: float) -> float:
        """Return the seconds per further token at this load."""
        return self.scale(load) * self._predicted_s(load)

    def tokens_s(self, most: int) -> Array:
        """Return the seconds per further token at each load from 1 to `most`."""
        loads = np.arange(1, most + 1, dtype=np.float64)
        octaves = np.rint(np.log2(loads)).astype(int)
        scales = np.array([self.scale(2.0**octave) for octave in range(int(octaves[-1]) + 1)])
        rows = self._columns[:, np.minimum(loads.astype(np.intp), len(self._rows) - 1)]
        seconds: Array = scales[octaves] * (self._less_saved(*rows) + self.others_s)
        return seconds

    def less_s(self, input_tokens: int, cached: int) -> float:
        """Return the predicted seconds by which cached tokens shorten `first_s`, the time for a mean prompt."""
        if not cached:
            return 0.0
        return max(0.0, self._input_s - self.prefill_s(input_tokens - cached, cached))

    def prefill_s(self, tokens: int, past: int) -> float:
        """Return the predicted seconds of a prefill behind this many cached tokens."""
        chunks = Chunks((tokens,), (past,), 1)
        return sum(stage.step(chunks, 0, 0.0) for stage in self._cost.encode.costs)

    def _delay_s(self, prompts: Sequence[tuple[int, int]], load: float) -> float:
        """Return the seconds by which the prefills of a replica's prompts delay `load` sequences."""
        *_, rate, delay_s = self._rows[min(math.ceil(load), len(self._rows) - 1)]
        if prompts and self._mixed:
            longer_s = self._mixed_s(prompts, load)
            if not self._pipelined:
                return longer_s
            # A pipeline's tokens wait for more than the mean stage, at most for all stages. But if prompts fill all
            # stages at all times, as after a burst, each of them delays a token by one stage.
            mean_s, stages = self._mixed_s([(self._input, 0)], load), len(self._cost.encode.costs)
            more = min(stages, max(1.0, delay_s / max(mean_s, 1e-9))) - 1
            idle = min(1.0, max(0.0, 1 - self._prefill_share) / max(1 - rate * mean_s, 1e-9))
            return longer_s * (1 + more * idle)
        return delay_s * sum(self.prefill_s(*prompt) for prompt in prompts) / self._input_s

    def _mixed_s(self, prompts: Sequence[tuple[int, int]], load: float) -> float:
        """Return the seconds by which prompts make an iteration with `load` sequences longer, on a mean stage."""
        costs, decoding = self._cost.encode.costs, max(1, round(load / self._at_once))
        tokens, past = zip(*prompts, strict=True)
        chunks = Chunks(tokens, past, len(prompts))
        more_s = (c.step(chunks, decoding, self._context) - c.step(None, decoding, self._context) for c in costs)
        return sum(more_s) / len(costs)

    def service_s(self, tokens: int, load: float) -> float:
        """Return the seconds from a sequence's start to the last of its tokens."""
        return self.first_s(load) + (tokens - 1) * self.token_s(load)

    def load_within(self, service_s: float, tokens: int) -> int:
        """Return how many sequences may share the engine so that this many tokens take at most `service_s`; 0: none."""
        low, high = 0, math.ceil(self._loads[-1])
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.service_s(tokens, middle) <= service_s else (low, middle - 1)
        return low

    @property
    def most(self) -> float:
        """The load above which sequences wait."""
        return float(self._loads[-1])

    def scale(self, load: float) -> float:
        """Return the ratio of measured to predicted time at this load.

        At a load without measurements, it is the ratio at the nearest load with some, but at least 1.
        """
        octave = _octave(min(load, self.most))
        if not self._scales or octave in self._scales:
            return self._scales.get(octave, 1.0)
        return max(1.0, self._scales[min(self._scales, key=lambda learned: (abs(learned - octave), learned))])

    # ---- measurements ----

    def shared_by(self, load: int, now_s: float) -> None:
        """Record that `load` running sequences share the engine from now on; waiting ones don't count."""
        if self._load:
            work = self._work_within(now_s - self._s[-1], self._load)
            self._mark(now_s, self._work[-1] + work, self._load_s[-1] + self._load * (now_s - self._s[-1]))
        elif load:
            self._mark(now_s, self._work[-1], self._load_s[-1])
        self._load, self._begun = load, []

    def served(self, tokens: int, first_s: float, last_s: float) -> None:
        """Learn from a sequence with this many tokens, given the times of its first and last tokens."""
        if tokens < 2 or last_s <= first_s or first_s < self._s[0]:
            return
        load = (self._at(last_s, self._load_s) - self._at(first_s, self._load_s)) / (last_s - first_s)
        ratio = (self._at(last_s, self._work) - self._at(first_s, self._work)) / (tokens - 1)
        octave, (low, high) = _octave(min(load, self.most)), _SCALES
        before = self._scales.get(octave, self.scale(load))
        self._scales[octave] = min(high, max(low, before + _MEMORY * (ratio - before)))

    def began(self, input_tokens: int, cached: int) -> None:
        """Record that a sequence has its first token; this many tokens of its prompt were in the cache."""
        self._begun.append((max(1, input_tokens - cached), cached))

    def found(self, input_tokens: int, cached: int) -> None:
        """Learn from a sequence that found this many tokens of its prompt in the cache."""
        saved = 0.0
        if cached:
            taken_s = self._delay_s([(input_tokens - cached, cached)], self.most)
            saved = max(0.0, 1 - taken_s / self._delay_s([(self._input, 0)], self.most))
        self._saved += _MEMORY * (saved - self._saved)

    def _work_within(self, seconds: float, load: int) -> float:
        """Return the tokens that each of `load` sequences should have received in the last seconds.

        Negative after long prefills, as the time until they ended has counted as work.
        """
        _, alone_s, _, _ = self._rows[min(load, len(self._rows) - 1)]
        begun = self._begun_share(load)
        self._prefill_share *= math.exp(-seconds / self._share_within_s)
        self._prefill_share += begun / 2  # the mean share is that in the middle of a prefill
        prefills_s = self._delay_s(self._begun, load) / self._replicas
        self._prefill_share += begun / 2
        return (seconds - self.scale(load) * prefills_s) / alone_s

    def _begun_share(self, load: int) -> float:
        """Return what the prefills since the last record add to `_prefill_share`; only pipelines need it."""
        if not self._begun or not self._pipelined:
            return 0.0
        return self.scale(load) * self._mixed_s(self._begun, load) / self._replicas / self._share_within_s

    def _predicted_s(self, load: float) -> float:
        """Return the predicted seconds per token."""
        return self._less_saved(*self._rows[min(math.ceil(load), len(self._rows) - 1)]) + self.others_s

    def _less_saved(self, whole: T, alone: T, rate: T, delay: T) -> T:
        """Return the seconds per token, from the columns of a load.

        Prefills take the share `1 - alone / whole` of the time without savings. With them, each takes less, and there
        are more: a sequence takes the engine `1 / rate` seconds, less what it saves.
        """
        busy: T = np.minimum(rate * delay, _MOST_BUSY)
        share = (1 - alone / whole) * (1 - self._saved) / (1 - busy * self._saved)
        return alone / (1 - share)

    def _mark(self, s: float, work: float, load_s: float) -> None:
        marks = (self._s, s), (self._work, work), (self._load_s, load_s)
        last = len(self._s) > 1 and s - self._s[-2] < _LEAST_S
        for values, value in marks:
            if last:
                values[-1] = value
            else:
                values.append(value)
        if len(self._s) > 2 * _MARKS:
            for values, _ in marks:
                del values[:_MARKS]

    def _at(self, s: float, values: list[float]) -> float:
        """Return the value of a mark at a time, interpolated between two marks or extrapolated after the last."""
        place = min(max(1, bisect_left(self._s, s)), len(self._s) - 1)
        if place == 0:
            return values[0]
        before, after = self._s[place - 1], self._s[place]
        share = (s - before) / (after - before) if after > before else 0.0
        return values[place - 1] + share * (values[place] - values[place - 1])


def _octave(load: float) -> int:
    return int(np.rint(np.log2(max(1.0, load))))


def _filled(schedule: Schedule, batch: int) -> Schedule:
    """Return the schedule with at most `batch` running sequences, or prompts at a time if that is its variable.

    With shared cached blocks, sequences need fewer blocks than their lengths require: the cache then holds any batch.
    """
    filled = replace(schedule, control=schedule.control.with_batch(batch))
    if not schedule.prefix_caching:
        return filled
    longest = schedule.workload.input.max + schedule.workload.output.max
    return replace(filled, kv_blocks=max(schedule.kv_blocks, batch * -(-longest // schedule.block_size)))


def _batches_at_once(schedule: Schedule) -> int:
    """Return how many batches are decoded at a time: one per micro-batch of each replica."""
    return schedule.replicas * micro_batching_of(schedule).count


def _steady(schedule: Schedule, cost: ReplicaCost, profile: Profile) -> LoadPoint:
    """Return the load point of a full engine; its mean number of sequences follows from Little's law."""
    residents, first_s, token_s = _steady_state(schedule, cost, profile)
    context = round(schedule.workload.input.mean) + schedule.workload.output.mean / 2
    decode_s = cost.decode.decode(max(1.0, residents / _batches_at_once(schedule)), context)
    return residents, first_s, token_s, float(decode_s.sum())


def _steady_state(schedule: Schedule, cost: ReplicaCost, profile: Profile) -> tuple[float, float, float]:
    """Return the mean number of sequences, the seconds to the first token, and the seconds per further token."""
    mean = schedule.workload.output.mean
    if xsimulator.has_steady_state(schedule):
        estimate = xsimulator.estimate(schedule, profile)
        if estimate.tpot_s is not None and estimate.ttft_s is not None:
            residents = estimate.throughput_seq_s * (estimate.ttft_s + (mean - 1) * estimate.tpot_s)
            return residents, estimate.ttft_s, estimate.tpot_s
    tokens = max(2, round(mean))
    standing = [Standing(round(schedule.workload.input.mean), tokens, tokens)] * 64
    ran = continue_from(schedule, cost, standing, math.inf)
    served_s = [(c.finish_s or 0.0) - (c.start_s or 0.0) for c in ran]
    per_token = median(served_s) / tokens
    return sum(served_s) / max(c.finish_s or 0.0 for c in ran), per_token, per_token
