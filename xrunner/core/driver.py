"""Driver: the rank that decides. It owns the ledger, orders one micro-batch after the other, and gets their tokens.

    policy ──Step──► MicroBatching ──MicroBatch──► assembly ──DeviceBatch──► this rank's stage ──states──► the others
    ──tokens──► here

The next step is decided when the first stage, this rank's, is free; lengths are booked then, whether their tokens are
there or not. A micro-batch that decodes is held back until the tokens that it takes are there. So a stop token may come
when a later iteration of its sequence has been booked, or is on its way: its rows are then ignored. Its blocks may be
taken again at once, since every stage does its work in the order in which it was given.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from exegpt.batching import MicroBatch, MicroBatching, Sequence, Step
from exegpt.orders import fcfs
from exegpt.policies import make_ledger, make_policy
from exegpt.request import FinishReason, Request, Result
from exegpt.schedule import Schedule
from exegpt.served import Served
from xrunner.comm.transport import TOKENS
from xrunner.core.adaptation import Change, takes_over_in_place
from xrunner.core.drift import Drift
from xrunner.core.events import Event, Token
from xrunner.rank.assembly import Assembler, DeviceBatch, Running
from xrunner.rank.sampling_state import Slots
from xrunner.rank.worker import END, Worker, read_result

_NAP_S = 0.02
"""Longest sleep while no request has arrived, so that an abort is noticed."""
_KEPT = 256
"""Ended requests that are remembered at least: forgetting goes over all."""


@dataclass(frozen=True)
class _Flight:
    """A micro-batch that is still on the stages."""

    receivers: list[Running]
    made: torch.Tensor
    pending: Any


class Driver:
    """One replica's requests: every step goes through one and the same line of stages.

    `aborted` are ids that any thread adds; `emit` gets every result, and with `stream` every token, as it comes.
    """

    def __init__(
        self,
        worker: Worker,
        schedule: Schedule,
        aborted: set[str],
        emit: Callable[[Event], None],
        stream: bool = False,
        adjustment: float | None = None,
    ):
        self.worker = worker
        self.policy: Any = make_policy(schedule, adjustment)
        self.ledger = make_ledger(schedule, fcfs)
        self.running: dict[int, Running] = {}
        """Requests by their places; ended ones are forgotten sooner or later."""
        self.assemble = Assembler(self.running, self.ledger.pool.block_size)
        self.micro_batching = _micro_batching(schedule, worker)
        self.now = worker.now
        self.served: list[Served] = []
        self.drift: Drift | None = None
        """What follows the lengths of this replica's requests."""
        self.look: Callable[[float], Change | None] = lambda now: None
        """The next change of schedule, once there is one."""
        self.elsewhere: Callable[[str], object] = lambda request_id: None
        """Called with the ids of aborted requests that this driver doesn't have."""
        self.changes: list[Change] = []
        self.left: list[int] = []
        """Places of the requests that are left to another engine."""
        self.moving: Change | None = None
        """To which schedule."""
        self._aborted, self._emit, self._stream, self._adjustment = aborted, emit, stream, adjustment
        self._slots = Slots()
        self._flying: deque[_Flight] = deque()
        self._stopped: list[Running] = []
        """Stopped by a stop token; not yet released from the ledger."""

    def add(self, requests: Iterable[tuple[int, Request]]) -> None:
        """Let requests wait, each with its place, which no other has."""
        for index, request in requests:
            prompt = np.array(request.prompt_ids, dtype=np.int64)
            sequence = Sequence(index, len(prompt), request.max_tokens, request.arrival_s)
            self.ledger.submit([sequence])
            self.running[index] = Running(request, sequence, prompt, start=self.worker.model.start)

    @property
    def idle(self) -> bool:
        """Whether all requests have ended."""
        return self.ledger.idle and not self._flying

    def turn(self) -> bool:
        """Take what has come, then decide and order the next step; whether there was one."""
        self._update()
        now = self.now()
        step = self._next(now)
        if step is not None:
            self._do(step, now)
        return step is not None

    def wait(self) -> None:
        """Sleep until something may have come: at most until the next arrival, and a little at a time."""
        if self._flying and self.worker.transport:
            self.worker.transport.wait(self._hear)
            return
        now = self.now()
        arrival = self.ledger.waiting.next_arrival(now)
        if arrival is None and self.ledger.waiting:
            raise RuntimeError(f"none of {len(self.ledger.waiting)} waiting requests is ever run")
        time.sleep(max(0.0, min((arrival or now + _NAP_S) - self.now(), _NAP_S)))

    def drain(self) -> None:
        """Run all requests to their ends, and let the other ranks of this replica go."""
        while not self.idle:
            if not self.turn():
                self.wait()
        self._land()

    def _next(self, now: float) -> Step | None:
        step: Step | None = self.policy.next_step(self.ledger, now)
        return step

    def _update(self) -> None:
        """Take tokens and aborts that have come, and a change of schedule."""
        self._hear()
        self._book_stops()
        self._drop_aborted()
        self._adapt()

    def _adapt(self) -> None:
        """Let another schedule take over, where one has been found for lengths that have drifted."""
        change = None if self.moving else self.look(self.now())
        if change is None:
            return
        new = change.schedule
        if takes_over_in_place(new, self.worker.place.schedule):
            self._take_over(new)
            self.changes.append(change)
        else:
            self.moving = change
            self.left = [sequence.index for sequence in self.ledger.waiting.drain()]

    def _take_over(self, new: Schedule) -> None:
        """Decide by another schedule from now on, in as many blocks as it reckons with, and those who wait need."""
        self.policy = make_policy(new, self._adjustment)
        self.micro_batching = _micro_batching(new, self.worker)
        self.ledger.pool.total = max([new.kv_blocks, *map(self.ledger.admission.blocks, self.ledger.waiting)])

    def _do(self, step: Step, now: float) -> None:
        """Order a step that was decided at `now`, and book it."""
        for sequence, _ in step.encode:
            self._begin(self.running[sequence.index], now)
        for number, micro_batch in enumerate(self.micro_batching.split(step)):
            self._await_tokens(micro_batch)
            # Alone, deciding is a part of the iteration, as it was when profiled; else waiting isn't.
            start = self.now() if number or self.worker.transport else now
            self._order(*self.assemble(micro_batch), start)
        self.ledger.advance(step)
        self._book_stops()
        self._forget()

    def _forget(self) -> None:
        """Drop what is known of requests that have left the ledger, once they are the most."""
        if len(self.running) <= 2 * (self.ledger.residents + len(self.ledger.waiting)) + _KEPT:
            return
        alive = {sequence.index for sequence in (*self.ledger.waiting, *self.ledger.resident)}
        for index in [index for index in self.running if index not in alive]:
            del self.running[index]

    def _begin(self, one: Running, now: float) -> None:
        """A request's encoding begins, unless it had begun."""
        if one.start_s is None:
            one.start_s = now
            if one.request.repetition_penalty != 1:
                one.slot = self._slots.allocate()
            if self.drift:
                self.drift.begin(one.sequence.index)

    def _await_tokens(self, micro_batch: MicroBatch) -> None:
        """Wait until the tokens that a micro-batch takes are there."""
        if not self.worker.transport:
            return
        decoding = [self.running[sequence.index] for sequence in micro_batch.decode]
        encoding = [self.running[sequence.index] for sequence, _ in micro_batch.encode]

        def known() -> bool:
            self._hear()
            return not (any(one.short_of for one in decoding) or any(one.lacks_output for one in encoding))

        self.worker.transport.wait(known)

    def _order(self, batch: DeviceBatch, receivers: list[Running], start: float) -> None:
        """Send a micro-batch to all ranks of this line, and do this rank's share of it."""
        worker, place = self.worker, self.worker.place
        if worker.transport:
            worker.transport.post(batch, *place.followers)
        made = worker.run(batch, start)
        if made is not None:
            self._give(receivers, made)
        elif receivers:
            assert worker.transport
            made = torch.empty(1 + len(receivers), dtype=torch.int64)
            self._flying.append(_Flight(receivers, made, worker.transport.expect(made, place.sampler, TOKENS)))

    def _hear(self) -> bool:
        """Take the tokens that have come; whether there were any."""
        count = len(self._flying)
        while self._flying and self.worker.transport and self.worker.transport.arrived(self._flying[0].pending):
            flight = self._flying.popleft()
            self._give(flight.receivers, flight.made)
        return len(self._flying) < count

    def _give(self, receivers: list[Running], made: torch.Tensor) -> None:
        """The tokens of a micro-batch to their requests; those that end by theirs are reported."""
        moment, tokens = read_result(made)
        eos = self.worker.model.eos
        for one, token in zip(receivers, tokens, strict=True):
            if one.ended:
                continue
            one.output.append(token)
            if self._stream:
                self._emit(Token(one.request.id, len(one.output) - 1, token, moment))
            if one.first_token_s is None:
                one.first_token_s = moment
            if token in eos and not one.request.ignore_eos:
                self._stopped.append(one)
                self._end(one, "stop", moment)
            elif len(one.output) == one.request.max_tokens:
                self._end(one, "length", moment)

    def _book_stops(self) -> None:
        for one in self._stopped:
            self.ledger.stop(one.sequence)
        self._stopped.clear()

    def _end(self, one: Running, reason: FinishReason, moment: float) -> None:
        start, first = one.start_s, one.first_token_s
        assert start is not None and first is not None, "a finished request has begun"
        request, sequence = one.request, one.sequence
        self.served.append(
            Served(sequence.index, sequence.input_tokens, len(one.output), request.arrival_s, start, first, moment)
        )
        self._report(one, reason, moment)

    def _report(self, one: Running, reason: FinishReason, moment: float) -> None:
        one.ended = True
        if one.slot is not None:
            self._slots.free(one.slot)
            one.slot = None
        request = one.request
        if self.drift and one.start_s is not None:
            made = None if reason == "cancelled" else len(one.output)
            self.drift.end(one.sequence.index, len(request.prompt_ids), made)
        times = (request.arrival_s, one.start_s, one.first_token_s, moment)
        self._emit(Result(request.id, len(request.prompt_ids), tuple(one.output), reason, *times))

    def _drop_aborted(self) -> None:
        if not self._aborted:
            return
        asked = set()
        while self._aborted:  # one by one: another thread may add meanwhile
            asked.add(self._aborted.pop())
        alive = [*self.ledger.waiting, *self.ledger.resident]
        for one in [self.running[sequence.index] for sequence in alive if not sequence.finished]:
            if one.request.id in asked:
                asked.remove(one.request.id)
                self.ledger.cancel(one.sequence)
                self._report(one, "cancelled", self.now())
        for request_id in asked:
            self.elsewhere(request_id)

    def _land(self) -> None:
        """Let the other ranks go, when nothing is on its way any more."""
        if self.worker.transport:
            self.worker.transport.post(END, *self.worker.place.followers)
        self.worker.drain()
        self._book_stops()
        self.ledger.check()


def _micro_batching(schedule: Schedule, worker: Worker) -> MicroBatching:
    """How a schedule's steps are split, one micro-batch for each stage unless it says otherwise."""
    count = schedule.micro_batches or len(worker.place.line)
    return MicroBatching(count, schedule.encode_micro_batches, schedule.replicas)
