"""Lanes: lines of stages. Each lane takes a step from the policy when its first stage is free, as in the replay.

See `xsimulator/replay/lanes.py`.

    policy ──Step──► MicroBatching ──MicroBatch──► assembly ──DeviceBatch──► the first stage ──states──► the others
    ──tokens──► the driver

Every driver is the first rank of its own lane. Where encoding and decoding are disaggregated it has a second lane, the
encoding side's (`encoding_lane.py`).
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from xcore.batching import MicroBatch, Step, Swap
from xcore.batching.step import StagePhase
from xcore.policies.waa import most_underway
from xcore.specs.schedule import Schedule
from xrunner.comm.transport import TOKENS, Pending
from xrunner.core.outputs import Outputs
from xrunner.rank.assembly import Assembler, DeviceBatch
from xrunner.rank.running import RunningRequest
from xrunner.rank.sampling_arrays import PromptRows
from xrunner.rank.worker import END, Worker


class EngineLane(Protocol):
    """A line of stages that runs steps."""

    phase: StagePhase

    @property
    def free(self) -> bool:
        """Return whether the lane can take a step.

        Prompts wait for no token, so the number of steps in progress is limited.
        """

    @property
    def idle(self) -> bool:
        """Return whether no micro-batch is in progress."""

    def run(self, step: Step, now: float) -> None:
        """Order a step that was decided at `now`, before the ledger books it."""

    def update(self) -> bool:
        """Process arrivals from the lane's stages. Return whether there were any."""

    def close(self) -> None:
        """Tell the lane's other ranks, once it is idle, that no more work will come."""


@dataclass(frozen=True)
class _Flight:
    """A micro-batch that the stages are still computing."""

    step: int
    """The number of its step."""
    receivers: list[RunningRequest]
    prompts: PromptRows | None
    result: torch.Tensor
    pending: Pending


class OwnLane:
    """The lane whose first stage is this rank: running a step includes this rank's share of it.

    The next step is decided when this rank is free. Lengths are booked then, whether the tokens have arrived or not. A
    decoding micro-batch is held back until its input tokens have arrived.
    """

    def __init__(self, worker: Worker, schedule: Schedule, outputs: Outputs, assemble: Assembler):
        self.phase = worker.place.line[0].phase
        self._worker, self._outputs, self._assemble = worker, outputs, assemble
        self._flying: deque[_Flight] = deque()
        """Micro-batches whose tokens have not arrived yet, in order."""
        self.swaps: tuple[Swap, ...] = ()
        """The copies between the cache and the host that come before the next micro-batch."""
        self._steps = 0
        """Number of steps that have been run."""
        self.follow(schedule)

    def follow(self, schedule: Schedule) -> None:
        """Split steps as a schedule says, or into one micro-batch per stage."""
        self._micro_batching = schedule.control.micro_batching(len(self._worker.place.line), schedule.replicas)

    @property
    def free(self) -> bool:
        """Whether the lane can take a step.

        Prompts wait for no token, so the number of steps in progress is limited.
        """
        stages = len(self._worker.place.line)
        return stages == 1 or len({flight.step for flight in self._flying}) < most_underway(stages)

    @property
    def idle(self) -> bool:
        """Whether no micro-batch is in progress."""
        return not self._flying

    def run(self, step: Step, now: float) -> None:
        """Order a step that was decided at `now`, and do this rank's share of it."""
        self._steps += 1
        for number, micro_batch in enumerate(self._micro_batching.split(step)):
            self._await_tokens(micro_batch)
            # Alone, deciding is a part of the iteration, as it was when profiled; else waiting isn't.
            start = self._worker.now() if number or self._worker.transport else now
            self._order(*self._assemble(micro_batch), start)

    def update(self) -> bool:
        """Take the tokens that have arrived. Return whether there were any."""
        count, transport = len(self._flying), self._worker.transport
        while self._flying and transport and transport.arrived(self._flying[0].pending):
            flight = self._flying.popleft()
            self._outputs.give(flight.receivers, flight.result, flight.prompts)
        return len(self._flying) < count

    def close(self) -> None:
        """Release the other ranks of the lane, once nothing is in progress."""
        if self._worker.transport:
            self._worker.transport.post(END, *self._worker.place.followers)
        self._worker.drain()

    def _with_swaps(self, batch: DeviceBatch) -> DeviceBatch:
        """Return the batch with the copies that come before it."""
        swaps, self.swaps = self.swaps, ()
        return replace(batch, swaps=swaps) if swaps else batch

    def _await_tokens(self, micro_batch: MicroBatch) -> None:
        """Wait until the input tokens of a micro-batch have arrived."""
        if not self._worker.transport:
            return
        needs = self._needs(micro_batch)

        def known() -> bool:
            self.update()
            return all(request.ended or request.known >= end for request, end in needs)  # failed ones lack a token

        self._worker.wait(known)

    def _needs(self, micro_batch: MicroBatch) -> list[tuple[RunningRequest, int]]:
        """Return how many tokens of each request of a micro-batch must be known."""
        counts = [(s, 1 + s.behind - s.finished) for s in micro_batch.decode]
        return [(self._outputs.running[s.index], s.cached + n) for s, n in (*micro_batch.encode, *counts)]

    def _order(self, batch: DeviceBatch, receivers: list[RunningRequest], start: float) -> None:
        """Send a micro-batch to all ranks of this line, and do this rank's share of it."""
        transport, place = self._worker.transport, self._worker.place
        batch = self._with_swaps(batch)
        if transport:
            transport.post(batch, *place.followers)
        result = self._worker.run(batch, start)
        if result is not None:
            self._outputs.give(receivers, result, batch.prompt_logprobs)
        elif batch.result_size > 1:
            assert transport
            result = torch.empty(batch.result_size, dtype=torch.int64)
            pending = transport.expect(result, place.sampler, TOKENS)
            self._flying.append(_Flight(self._steps, receivers, batch.prompt_logprobs, result, pending))
