"""One replica's continuous batching as in batching_run.c, which Python loads instead where it was compiled.

The arithmetic is the same, so that results are equal to the last digit. See batching_run.pyi for the arguments.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from xcore.arrays import Array, Integers
from xcore.grid_arrays import check_arrays, check_sizes

_BLOCK = 16
"""Positions of a block of the cache."""


def batching_run(
    prefill: Array,
    sampled: Array,
    decode: Array,
    ready: Array,
    prompts: Integers,
    outputs: Integers,
    following: Integers,
    arrivals: Integers,
    settings: Array,
    done: Array,
    generated: Array,
    computed: Array,
) -> tuple[bytes, float, int, int]:
    """Run n calls; return the work's curve as float64 pairs, the busy seconds, the iterations and the preemptions."""
    check_arrays((prefill, sampled, decode, ready, settings, done, generated, computed))
    check_arrays((prompts, outputs, following, arrivals), np.int64)
    most, count = sampled.size - 1, prompts.size
    check_sizes(
        settings.size == 8 and most > 0 and prefill.size == decode.size == 3 * (most + 1) and arrivals.size <= count
    )
    check_sizes(all(array.size == count for array in (ready, outputs, following, done, generated, computed)))
    if not count:
        return b"", 0.0, 0, 0
    start, until, blocks, watermark, most_tokens, padded, work_token, work_position = settings.tolist()
    run = _Run(
        prefill.reshape(-1, 3).tolist(),
        sampled.tolist(),
        decode.reshape(-1, 3).tolist(),
        ready.tolist(),
        following.tolist(),
        deque(arrivals.tolist()),
        now=start,
        until=until,
        free=int(blocks),
        watermark=int(watermark),
        most=most,
        most_tokens=int(most_tokens),
        padded=bool(padded),
        work_token=work_token,
        work_position=work_position,
        prompt=prompts.tolist(),
        left=outputs.tolist(),
        cached=[0] * count,
        held=[0] * count,
        done=done.tolist(),
        generated=generated.tolist(),
        computed=computed.tolist(),
    )
    run.to_the_end()
    done[:], generated[:], computed[:] = run.done, run.generated, run.computed
    return np.array(run.curve).tobytes(), run.busy, run.iterations, run.preemptions


@dataclass
class _Run:
    """A replica and its calls, by their places."""

    prefill_costs: list[list[float]]
    sampled: list[float]
    decode_costs: list[list[float]]
    ready: list[float]
    following: list[int]
    arrivals: deque[int]
    now: float
    until: float
    free: int
    """Blocks."""
    watermark: int
    most: int
    most_tokens: int
    padded: bool
    work_token: float
    work_position: float
    prompt: list[int]
    left: list[int]
    cached: list[int]
    held: list[int]
    done: list[float]
    generated: list[float]
    computed: list[float]
    queue: deque[int] = field(default_factory=deque)
    running: list[int] = field(default_factory=list)
    """By admission."""
    curve: list[float] = field(default_factory=list)
    work: float = 0.0
    busy: float = 0.0
    iterations: int = 0
    preemptions: int = 0

    def to_the_end(self) -> None:
        """Run until nothing is left, or until the next iteration would end after `until`."""
        self._mark()
        while True:
            self._arrive()
            if not self.running and not self.queue:
                if not self.arrivals or not self.ready[self.arrivals[0]] < self.until:
                    return
                self.now = self.ready[self.arrivals[0]]
                self._mark()
                continue
            count = self._admissible()
            if not count and not self.running:
                raise ValueError("a sequence doesn't fit in the cache")
            if not (self._prefill(count) if count else self._decode()):
                return

    def _arrive(self) -> None:
        while self.arrivals and self.ready[self.arrivals[0]] <= self.now:
            self.queue.append(self.arrivals.popleft())

    def _mark(self) -> None:
        self.curve += [self.now, self.work]

    def _work_of(self, n: float) -> float:
        """Return the multiply-adds of computing positions 1 to n of a sequence."""
        return n * self.work_token + 0.5 * n * (n + 1.0) * self.work_position

    def _release_finished(self) -> None:
        """End sequences without outputs left; the call that follows each begins to wait."""
        ended = [i for i in self.running if not self.left[i]]
        if ended:
            self._arrive()  # what came before waits in front of them
        for i in ended:
            self.done[i] = self.now
            self.free += self.held[i]
            if self.following[i] >= 0:
                self.queue.append(self.following[i])
        self.running = [i for i in self.running if self.left[i]]

    def _admissible(self) -> int:
        """Return how many prompts from the front of the queue go into one prefill."""
        count, free, longest, total = 0, self.free, 0, 0
        for i in self.queue:
            length = self.prompt[i]
            need, most = -(-length // _BLOCK), max(length, longest)
            tokens = (count + 1) * most if self.padded else total + length
            full = len(self.running) + count >= self.most or free - need < self.watermark
            if full or (count and tokens > self.most_tokens):
                break
            longest, total, free, count = most, total + length, free - need, count + 1
        return count

    def _prefill(self, count: int) -> bool:
        """Prefill the first prompts; return False if that would end after `until`."""
        total = squares = longest = 0.0
        for place in range(count):
            length = float(self.prompt[self.queue[place]])
            total, squares, longest = total + length, squares + length * length, max(longest, length)
        fixed, per_token, per_square = self.prefill_costs[count]
        tokens = count * longest if self.padded else total
        squares = count * longest * longest if self.padded else squares
        seconds = fixed + per_token * tokens + per_square * squares + self.sampled[count] * total
        if self.now + seconds > self.until:
            return False
        self.now, self.busy, self.iterations = self.now + seconds, self.busy + seconds, self.iterations + 1
        for _ in range(count):
            self._begin(self.queue.popleft())
        self._release_finished()
        self._mark()
        return True

    def _begin(self, i: int) -> None:
        length = self.prompt[i]
        self.cached[i], self.held[i] = length, -(-length // _BLOCK)
        self.free -= self.held[i]
        self.running.append(i)
        if length > self.computed[i]:
            self.work += self._work_of(float(length)) - self._work_of(self.computed[i])
            self.computed[i] = float(length)
        self.left[i] -= 1
        self.generated[i] += 1

    def _most_by_cache(self, most: int) -> int:
        """Return how many iterations, up to `most`, have free blocks."""
        slack = [0] * _BLOCK
        for i in self.running:
            slack[self.held[i] * _BLOCK - self.cached[i]] += 1

        def fits(k: int) -> bool:
            need = sum(slack[s] * ((k - s - 1) // _BLOCK + 1) for s in range(min(k, _BLOCK)))
            return need <= self.free

        return _most(most, fits)

    def _preempt_last(self) -> None:
        i = self.running.pop()
        self.free += self.held[i]
        self.prompt[i] = self.cached[i] + 1  # the token that it made last was never cached
        self.preemptions += 1
        self.queue.appendleft(i)

    def _decode(self) -> bool:
        """Decode until something happens; return False if the next iteration would end after `until`."""
        while not self._most_by_cache(1):
            self._preempt_last()
        lengths, batch = [self.cached[i] + 1 for i in self.running], len(self.running)
        k = self._most_by_cache(min(self.left[i] for i in self.running))
        fixed, per_token, per_longest = self.decode_costs[batch]
        first = fixed + per_token * float(sum(lengths)) + per_longest * float(max(lengths))
        more = per_token * float(batch) + per_longest
        if not self.queue and self.arrivals:  # an arrival may be admitted after the iteration that it falls in
            before = _most_within(first, more, k, self.ready[self.arrivals[0]] - self.now)
            k = min(k, before + 1)
        if self.until < math.inf:
            k = _most_within(first, more, k, self.until - self.now)
        if not k:
            return False
        seconds = _seconds_of(first, more, float(k))
        self.now, self.busy, self.iterations = self.now + seconds, self.busy + seconds, self.iterations + k
        positions = _seconds_of(float(sum(lengths)), float(batch), float(k))
        self.work += float(k * batch) * self.work_token + self.work_position * positions
        for i in self.running:
            self._extend(i, k)
        self._release_finished()
        self._mark()
        return True

    def _extend(self, i: int, k: int) -> None:
        self.cached[i] += k
        self.left[i] -= k
        self.generated[i] += float(k)
        self.computed[i] = float(self.cached[i])
        held = -(-self.cached[i] // _BLOCK)
        self.free -= held - self.held[i]
        self.held[i] = held


def _seconds_of(first: float, more: float, k: float) -> float:
    """Return the seconds of k iterations: the first one takes `first`, and each next one `more` more."""
    return k * first + more * k * (k - 1.0) / 2.0


def _most_within(first: float, more: float, k: int, seconds: float) -> int:
    """Return the most iterations, up to k, that take no longer than `seconds`."""
    return _most(k, lambda middle: _seconds_of(first, more, float(middle)) <= seconds)


def _most(high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `high` that fits, given that all below it do; 0 always does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
