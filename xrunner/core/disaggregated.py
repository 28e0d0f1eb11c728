"""The driver where encoding and decoding have stages of their own (WAA): each side is given work when it is free.

The driver is the decoding side's first rank. It orders decoding iterations as every driver does, and looks after the
encoding side between two layers of its own work and while it waits: a batch is encoded when the encoding side's first
stage is free and no more batches are under way there than keep it busy, as in the replay, nor from there to here. So
that side waits for no longer than one of the driver's layers takes. A batch joins the decoding when its first tokens
are here and every decoding rank has its keys and values.
"""

from collections import deque
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch

from exegpt.batching import MicroBatching, Sequence, Step
from exegpt.policies.waa import most_underway
from xrunner.comm.encoder_output import slots_in
from xrunner.comm.kv_transfer import Arrival, most_in_transfer
from xrunner.comm.transport import NOTICE, TOKENS
from xrunner.core.driver import Driver
from xrunner.rank.assembly import Running
from xrunner.rank.worker import END, FREE, Worker

_NAP_S = 0.02
"""Longest wait without a look at what others ask for."""


@dataclass
class _Batch:
    """A batch from its order to its joining the decoding."""

    number: int
    sequences: list[Sequence]
    receivers: list[Running]
    made: torch.Tensor
    pending: Any
    """Its tokens."""
    missing: int
    """How many decoding ranks have yet to say that its keys and values are there."""
    out: bool = False
    """Whether its tokens have come."""


class DisaggregatedDriver(Driver):
    """One replica's run with two lines of stages."""

    def __init__(self, worker: Worker, *given: Any):
        super().__init__(worker, *given)
        assert worker.transport and worker.receiving, "two sides are two ranks at least"
        self._transport, self._receiving = worker.transport, worker.receiving
        self._encoder = worker.place.encoder
        stages = len(self._encoder.line)
        self._most, self._most_in_transfer = most_underway(stages), most_in_transfer(stages)
        self._ordered = self._freed = self._outs = 0
        """Batches so far: ordered; through the first stage; through the last."""
        self._batches: deque[_Batch] = deque()
        """Those that have yet to join, in the order in which they were ordered."""
        self._transport.meanwhile = self._look_after

    @property
    def idle(self) -> bool:
        """Whether all requests have ended and both sides are free."""
        return super().idle and not self._batches and self._freed == self._ordered

    def wait(self) -> None:
        """Take turns as soon as there is something to do, for a little while."""
        end = self.now() + _NAP_S
        self._transport.wait(lambda: self.turn() or self.idle or self.now() >= end)

    def _next(self, now: float) -> Step | None:
        step: Step | None = self.policy.next_decode(self.ledger, now)
        return step

    def _update(self) -> None:
        self._look_after()
        super()._update()

    def _land(self) -> None:
        self._transport.meanwhile = None
        self._transport.post(END, *self._encoder.followers)
        super()._land()

    def _look_after(self) -> None:
        """Hear of the encoding side and of what has arrived, and give it work."""
        while (notice := self._transport.poll(tag=NOTICE)) is not None:
            if notice == FREE:
                self._freed += 1
            else:
                self._arrived(notice)
        for number in self._receiving.arrived():
            self._arrived(number)
        for batch in self._batches:
            if not batch.out and self._transport.arrived(batch.pending):
                batch.out = True
                self._outs += 1
                self._give(batch.receivers, batch.made)
        while self._batches and self._batches[0].out and not self._batches[0].missing:
            for sequence in self._batches.popleft().sequences:
                sequence.ready_s = self.now()
        self._encode()

    def _arrived(self, number: int) -> None:
        """A decoding rank has a batch's keys and values."""
        batch = next(batch for batch in self._batches if batch.number == number)
        batch.missing -= 1

    def _encode(self) -> None:
        """Order the next batch, if the encoding side is free for it and somebody can be admitted."""
        if self._freed < self._ordered or self._ordered - self._outs >= self._most:
            return
        if len(self._batches) >= self._most_in_transfer:
            return
        now = self.now()
        step = self.policy.next_encode(self.ledger, now)
        if step is None:
            return
        running = [self.running[sequence.index] for sequence, _ in step.encode]
        pool, taken, theirs, ours = self.ledger.pool, 0, [], []
        for one in running:
            self._begin(one, now)
            one.sequence.ready_s = inf
            count = pool.blocks_for(one.sequence.input_tokens)
            one.table = np.arange(taken, taken + count, dtype=np.int32)  # over there a batch has the cache for itself
            if one.start:  # an encoder's output goes as it is
                ours.append(slots_in(one.sequence.blocks, one.sequence.input_tokens, pool.block_size))
            elif one.sequence.max_output > 1:
                theirs.append(one.table)
                ours.append(np.array(one.sequence.blocks[:count], dtype=np.int64))
            taken += count
        (micro_batch,) = MicroBatching(1).split(step)
        batch, receivers = self.assemble(micro_batch)
        for one in running:
            one.table = np.asarray(one.sequence.blocks, dtype=np.int32)
            one.entered = 0  # the decoding side has a sampling state of its own
        self.ledger.advance(step)
        sent = np.concatenate(theirs).astype(np.int64) if theirs else None
        self._transport.post(replace(batch, transferred=sent), *self._encoder.followers)
        made = torch.empty(1 + len(receivers), dtype=torch.int64)
        pending = self._transport.expect(made, self._encoder.sampler, TOKENS)
        missing = 1 + len(self.worker.place.followers) if ours else 0
        sequences = [one.sequence for one in running]
        self._batches.append(_Batch(self._ordered, sequences, receivers, made, pending, missing))
        if ours:
            arrival = Arrival(self._ordered, np.concatenate(ours))
            self._transport.post(arrival, *self.worker.place.followers)
            self._receiving.expect(arrival)
        self._ordered += 1
