"""Driver: the rank that decides.

It owns the ledger and gives every free lane the policy's next step.

A sequence that ends by a stop token may have a later iteration booked already, or on the stages.
Its blocks may still be allocated again at once, since every stage does its work in the order in which it was ordered.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from xcore.batching import UNKNOWN, FollowingOrder, Hints, Order, Preemption, PrefixPool, Sequence
from xcore.batching.kv_pool import KVPool
from xcore.batching.sequence import PREEMPTED
from xcore.batching.step import StagePhase
from xcore.orders import fcfs
from xcore.policies import Policy
from xcore.policies.from_schedule import make_ledger, make_policy, shares_in_step
from xcore.requests.request import Request
from xcore.specs.change import Change, takes_over_in_place
from xcore.specs.schedule import Schedule
from xrunner.core.ahead import AheadLane
from xrunner.core.encoding_lane import EncodingLane
from xrunner.core.engine_lanes import EngineLane, OwnLane
from xrunner.core.outputs import Outputs
from xrunner.rank.assembly import Assembler
from xrunner.rank.worker import Worker

_NAP_S = 0.02
"""Longest wait, so that requests and aborts of this rank are noticed."""


@dataclass(frozen=True)
class Options:
    """How drivers decide, and what they record."""

    stream: bool = True
    """Whether events have every token."""
    record: bool = False
    """Whether a timeline and the requests' times are recorded; both grow with the run."""
    spans: bool = False
    """Whether spans are kept until they are taken (`Engine.take_spans`)."""
    promises: bool = False
    """Whether predictions from the schedule's lengths are used; see `Adaptation`."""
    order: Order = fcfs
    """The order of waiting requests."""
    pins: bool = False
    """Whether waiting requests hold the cached blocks of their prompts; see `Ledger.pin`."""
    hints: Callable[[Request], Hints] | None = None
    """The order's hints on each request; None: no hints."""
    policy: Policy | None = None
    """The policy that decides; None: the schedule's."""
    preemption: Preemption | None = None
    """How running requests give way to waiting ones; None: they don't."""


class Driver:
    """One replica's requests, on the lanes of its stages.

    `aborted` are ids that any thread adds, each with the length of an output that is complete, else None. `pool` has
    the cache's blocks, if they differ from the blocks of the schedule.
    """

    def __init__(
        self,
        worker: Worker,
        schedule: Schedule,
        aborted: dict[str, int | None],
        outputs: Outputs,
        options: Options,
        pool: KVPool | None = None,
    ):
        self.worker, self.outputs = worker, outputs
        self.policy = options.policy or make_policy(schedule)
        self.ledger = make_ledger(schedule, options.order, pool, False, options.preemption)
        self._pins = options.pins
        if options.pins and isinstance(self.ledger.pool, PrefixPool):
            self.ledger.pool.record_changes()
        assemble = Assembler(outputs.running, self.ledger.pool.block_size)
        kind = AheadLane if worker.gpu and not worker.transport else OwnLane
        self._own = kind(worker, schedule, outputs, assemble)
        self._others: list[EngineLane] = []
        if schedule.traits.disaggregated:
            self._others.append(EncodingLane(worker, outputs, assemble, self.ledger))
            worker.between = self._turn_others
        self.lanes = [*self._others, self._own]
        """This rank's own lane is the last one: a step of it keeps the driver busy."""
        self.look: Callable[[float], Change | None] = lambda now: None
        """Returns the next change of schedule, or None."""
        self.asked: Change | None = None
        """A change that is made whatever the lengths are."""
        self.elsewhere: Callable[[str], object] = lambda request_id: None
        """Called with the ids of aborted requests that this driver doesn't have."""
        self._asked_all = False
        """Whether the policy was offered all requests that have arrived, and ran none of them."""
        self.changes: list[Change] = []
        self.left: list[int] = []
        """Places of the requests that are left to another engine."""
        self.moving: Change | None = None
        """The change that needs another engine."""
        self._aborted, self._hints = aborted, options.hints

    def now(self) -> float:
        """Return the seconds since the run began."""
        return self.worker.now()

    @property
    def idle(self) -> bool:
        """Whether all requests have ended."""
        return self.ledger.idle and all(lane.idle for lane in self.lanes)

    @property
    def computing(self) -> bool:
        """Whether a step of this rank's lane is in progress."""
        return not self._own.idle

    def add(self, requests: Iterable[tuple[int, Request]]) -> int | None:
        """Add requests to the waiting ones, each with its unique place.

        Return the number of cached tokens that they hold; None unless `Options.pins`.
        """
        start = self.worker.model.start
        sequences = [self._sequence(index, request, start) for index, request in requests]
        self._make_room(sequences)
        self.ledger.submit(sequences)
        return sum(self.ledger.pin(sequence) for sequence in sequences) if self._pins else None

    def _make_room(self, sequences: Iterable[Sequence]) -> None:
        """Grow the pool so that each of these sequences fits alone, up to the cache's blocks.

        A schedule that has taken over may have fewer blocks.
        """
        pool = self.ledger.pool
        if self.changes:
            most = max(map(self.ledger.most_blocks, sequences), default=0)
            pool.set_total(max(pool.total, min(most, self.worker.place.schedule.kv_blocks)))

    def _sequence(self, index: int, request: Request, start: tuple[int, ...]) -> Sequence:
        sequence = self.outputs.add(index, request, start)
        sequence.hints = self._hints(request) if self._hints else UNKNOWN
        return sequence

    def turn(self) -> bool:
        """Process all arrivals, then give every free lane its next step. Return whether there was a step."""
        self.update()
        steps = [self._offer(lane) for lane in self.lanes]
        return any(steps)

    def update(self) -> None:
        """Process all arrivals: tokens, stops, aborts, another schedule."""
        for lane in self.lanes:
            lane.update()
        self._book_stops()
        self._drop_aborted()
        self._adapt()

    def run_phase(self, phase: StagePhase) -> bool:
        """Give this rank's lane the next step of a phase. Return whether there was one."""
        return self._offer(self._own, phase)

    def wait(self) -> None:
        """Wait for tokens, at most until the next arrival or for `_NAP_S`.

        Raises:
            RuntimeError: Requests wait that the policy never runs.
        """
        now = self.now()
        arrival = self.ledger.waiting.next_arrival(now)
        until = min(inf if arrival is None else arrival, now + _NAP_S)
        if not all(lane.idle for lane in self.lanes):
            self.worker.wait(lambda: any(lane.update() for lane in self.lanes) or self.now() >= until)
        elif arrival is None and self.ledger.waiting:
            if self._asked_all:
                raise RuntimeError(f"the policy never runs any of {len(self.ledger.waiting)} waiting requests")
            self._asked_all = True  # the last may have arrived after the policy was asked: ask once more
        else:
            time.sleep(max(0.0, until - self.now()))

    def drain(self) -> None:
        """Run all requests to completion, and release the other ranks of this replica."""
        while not self.idle:
            if not self.turn():
                self.wait()
        self.worker.between = lambda: None
        for lane in self.lanes:
            lane.close()
        self._book_stops()
        self.ledger.check()

    def _offer(self, lane: EngineLane, phase: StagePhase | None = None) -> bool:
        """Give a free lane the policy's next step, of the lane's phase or another. Return whether there was one."""
        if not lane.free:
            return False
        now = self.now()
        self.ledger.observe(now)
        step = self.policy.next_step(self.ledger, now, phase or lane.phase)
        for victim in self.outputs.of(self.ledger.giving_way.take_preempted()):
            if victim.sequence.status is PREEMPTED and victim.lacks_output:  # its last token may be a stop token
                victim.sequence.last_token_s = inf
        if step is None:
            return False
        self._asked_all = False
        for sequence, _ in step.encode:
            self.outputs.begin(self.outputs.running[sequence.index], now)
        self._own.swaps += self.ledger.giving_way.take_swaps()
        lane.run(step, now)
        if phase and isinstance(self.ledger.waiting.order, FollowingOrder):
            # It shares devices: the step is over, but on a GPU of its rank alone, where it may only have been queued.
            self.ledger.waiting.order.ran(step, self.now() - now, self.now())
        self.ledger.advance(step)
        self._book_stops()
        self._forget()
        return True

    def _turn_others(self) -> None:
        """Give work to the other lanes while this rank computes or waits.

        A lane waits at most for the time of one of this rank's layers.
        """
        for lane in self._others:
            lane.update()
            self._offer(lane)

    def _adapt(self) -> None:
        """Change to another schedule, if one has been found for drifted lengths."""
        change = None if self.moving else self.asked or self.look(self.now())
        self.asked = None
        if change is None:
            return
        new = change.schedule
        if takes_over_in_place(new, self.worker.place.schedule):
            self.changes.append(change)
            self._take_over(new)
        else:
            self.moving = change
            self.left = [sequence.index for sequence in self.ledger.leave()]

    def _take_over(self, new: Schedule) -> None:
        """Decide by another schedule from now on, with its number of blocks.

        The pool grows so that each waiting request fits alone, and so does each resident request, which may be
        preempted.
        """
        self.policy = make_policy(new)
        self._own.follow(new)
        self.ledger.shares_in_step = shares_in_step(new)
        self.ledger.pool.set_total(new.kv_blocks)
        self._make_room(self.ledger.waiting)
        if self.ledger.admission.grows:
            self._make_room(self.ledger.resident)

    def _book_stops(self) -> None:
        for sequence in self.outputs.take_stopped():
            self.ledger.stop(sequence)
        for sequence in self.outputs.take_failed():
            self.ledger.fail(sequence)

    def _forget(self) -> None:
        """Drop the records of requests that have left the ledger, if most records are of such requests."""
        count = self.ledger.residents + len(self.ledger.waiting)
        self.outputs.forget((s for part in (self.ledger.waiting, self.ledger.resident) for s in part), count)

    def _drop_aborted(self) -> None:
        if not self._aborted:
            return
        asked: dict[str, int | None] = {}
        while self._aborted:  # one by one: another thread may add meanwhile
            asked.update([self._aborted.popitem()])
        alive = [s for s in (*self.ledger.waiting, *self.ledger.resident) if not s.finished]
        for running in self.outputs.of(alive):
            if running.request.id in asked:
                output_tokens = asked.pop(running.request.id)
                self.ledger.cancel(running.sequence)
                self.outputs.cancel(running, self.now(), output_tokens)
        for request_id in asked:
            self.elsewhere(request_id)
