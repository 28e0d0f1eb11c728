"""The encoding side's lane, where encoding and decoding have separate stages (WAA).

The driver is the decoding side's first rank. It gives this lane work between two of its own layers and while it waits.
A batch is prefilled when the encoding side's first stage is free and the number of batches in progress allows it.
That number is limited on the encoding stages and in transfer, as in the replay. A batch joins the decoding when
its first tokens are here and every decoding rank has its keys and values.
"""

from collections import deque
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch

from xcore.arrays import Integers
from xcore.batching import Ledger, MicroBatching, Sequence, Step
from xcore.batching.step import StagePhase
from xcore.policies.waa import most_in_transfer, most_underway
from xrunner.comm.encoder_output import slots_in
from xrunner.comm.kv_transfer import KVArrival
from xrunner.comm.transport import NOTICE, TOKENS, Pending
from xrunner.core.outputs import Outputs
from xrunner.rank.assembly import Assembler
from xrunner.rank.running import RunningRequest
from xrunner.rank.sampling_arrays import PromptRows
from xrunner.rank.worker import END, FREE, Worker


@dataclass
class _Batch:
    """A batch from its order until it joins decoding."""

    number: int
    sequences: list[Sequence]
    receivers: list[RunningRequest]
    prompts: PromptRows | None
    result: torch.Tensor
    pending: Pending
    """The receive of its tokens."""
    missing: int
    """The number of decoding ranks that have not reported its keys and values yet."""
    out: bool = False
    """Whether its tokens have arrived."""


class EncodingLane:
    """Batches of prompts on the encoding stages, and in transfer to the decoding ranks."""

    phase: StagePhase = "encode"

    def __init__(self, worker: Worker, outputs: Outputs, assemble: Assembler, ledger: Ledger):
        assert worker.transport and worker.receiving, "two sides are two ranks at least"
        self._worker, self._outputs, self._assemble, self._ledger = worker, outputs, assemble, ledger
        self._transport, self._receiving = worker.transport, worker.receiving
        self._encoder = worker.place.encoder
        stages = len(self._encoder.line)
        self._most, self._most_in_transfer = most_underway(stages), most_in_transfer(stages)
        self._ordered = self._freed = self._outs = 0
        """Numbers of batches so far: ordered; through the first stage; through the last."""
        self._batches: deque[_Batch] = deque()
        """Batches that have not joined yet, in the order in which they were ordered."""

    @property
    def free(self) -> bool:
        """Whether the first encoding stage is free, and one more batch may be in progress."""
        if self._freed < self._ordered or self._ordered - self._outs >= self._most:
            return False
        return len(self._batches) < self._most_in_transfer

    @property
    def idle(self) -> bool:
        """Whether no batch is in progress."""
        return not self._batches and self._freed == self._ordered

    def update(self) -> bool:
        """Take notices and tokens; complete batches join the decoding. Return whether anything has arrived."""
        came = False
        while (notice := self._transport.poll(tag=NOTICE)) is not None:
            came = True
            if notice == FREE:
                self._freed += 1
            else:
                self._arrived(notice)
        for number in self._receiving.arrived():
            came = True
            self._arrived(number)
        for batch in self._batches:
            if not batch.out and self._transport.arrived(batch.pending):
                came = batch.out = True
                self._outs += 1
                self._outputs.give(batch.receivers, batch.result, batch.prompts)
        while self._batches and self._batches[0].out and not self._batches[0].missing:
            self._ledger.arrived(self._batches.popleft().sequences, self._worker.now())
        return came

    def run(self, step: Step, now: float) -> None:
        """Order a batch: send the encoding ranks their work, and announce to the decoding ranks what will arrive."""
        running = self._outputs.of(sequence for sequence, _ in step.encode)
        sent, places = self._tables(running)
        (micro_batch,) = MicroBatching(1).split(step)
        batch, receivers = self._assemble(micro_batch)
        for request in running:
            request.table = None  # on the decoding side it has other blocks
            request.entered = 0  # the decoding side has a sampling state of its own
            request.sequence.kv_arrived_s = inf
        self._transport.post(replace(batch, transferred=sent), *self._encoder.followers)
        result = torch.empty(batch.result_size, dtype=torch.int64)
        pending = self._transport.expect(result, self._encoder.sampler, TOKENS)
        missing = 0 if places is None else 1 + len(self._worker.place.followers)
        sequences = [request.sequence for request in running]
        self._batches.append(
            _Batch(self._ordered, sequences, receivers, batch.prompt_logprobs, result, pending, missing)
        )
        if places is not None:
            arrival = KVArrival(self._ordered, places)
            self._transport.post(arrival, *self._worker.place.followers)
            self._receiving.expect(arrival)
        self._ordered += 1

    def close(self) -> None:
        """Tell the encoding ranks that no more work will come."""
        self._transport.post(END, *self._encoder.followers)

    def _tables(self, running: list[RunningRequest]) -> tuple[Integers | None, Integers | None]:
        """Give requests the block tables of the encoding side, on which one batch has the whole cache.

        Returns:
            The blocks on that side, [n], and the places of the received data on this one, as in `KVArrival`.
        """
        pool, taken, sent, places = self._ledger.pool, 0, [], []
        for request in running:
            sequence = request.sequence
            count = pool.blocks_for(sequence.to_prefill)
            request.table, request.tabled = np.arange(taken, taken + count, dtype=np.int32), None
            if request.start:  # an encoder's output is sent unchanged
                places.append(slots_in(sequence.blocks, sequence.input_tokens, pool.block_size))
            elif sequence.max_output > sequence.recomputed + 1:
                sent.append(request.table)
                places.append(np.array(sequence.blocks[:count], dtype=np.int64))
            taken += count
        return np.concatenate(sent).astype(np.int64) if sent else None, np.concatenate(places) if places else None

    def _arrived(self, number: int) -> None:
        """Record that a decoding rank has a batch's keys and values."""
        batch = next(batch for batch in self._batches if batch.number == number)
        batch.missing -= 1
