"""The lane of a rank that has its GPU for itself: the next step is queued while the current one is computed.

Sampled tokens stay on the device, where the next step takes them; the host gets them a step later.
So a stop token ends its sequence a step later too, as on a pipeline.
"""

from collections import deque
from dataclasses import dataclass

from xcore.batching import MicroBatch, Step
from xcore.specs.schedule import Schedule
from xrunner.core.engine_lanes import OwnLane
from xrunner.core.outputs import Outputs
from xrunner.rank.assembly import Assembler
from xrunner.rank.running import RunningRequest
from xrunner.rank.worker import LaunchedBatch, Worker


@dataclass(frozen=True)
class _OnDevice:
    """A micro-batch on the device."""

    receivers: list[RunningRequest]
    launched: LaunchedBatch


class AheadLane(OwnLane):
    """The lane of a rank that has its GPU for itself."""

    def __init__(self, worker: Worker, schedule: Schedule, outputs: Outputs, assemble: Assembler):
        super().__init__(worker, schedule, outputs, assemble)
        self._computed: deque[_OnDevice] = deque()
        """Micro-batches whose tokens haven't been taken yet, in order."""

    @property
    def idle(self) -> bool:
        """Whether no micro-batch is in progress."""
        return not self._computed

    def run(self, step: Step, now: float) -> None:
        """Queue a step that was decided at `now`; at most one earlier micro-batch is still computed then."""
        for micro_batch in self._micro_batching.split(step):
            self._land(1)
            sampled = self._sampled(micro_batch)
            batch, receivers = self._assemble(micro_batch, sampled)
            self._computed.append(_OnDevice(receivers, self._worker.launch(self._with_swaps(batch), now)))

    def update(self) -> bool:
        """Take the tokens that have arrived. Return whether there were any."""
        count = len(self._computed)
        while self._computed and self._worker.is_complete(self._computed[0].launched):
            self._take()
        return len(self._computed) < count

    def _sampled(self, micro_batch: MicroBatch) -> dict[int, int]:
        """Return where a micro-batch's missing input tokens are among the tokens sampled last, by sequence index.

        If other tokens are missing (of a prompt or a preempted sequence, or for a penalty or a grammar), wait for all
        of them.
        """
        short = [request for request, end in self._needs(micro_batch) if not request.ended and request.known < end]
        if not short:
            return {}
        places = {request.sequence.index: place for place, request in enumerate(self._computed[-1].receivers)}
        decoding = {s.index for s in micro_batch.decode if not s.behind}
        indices = [request.sequence.index for request in short]
        if any(request.needs_output for request in short) or not decoding.intersection(places).issuperset(indices):
            self._land(0)
            return {}
        return {index: places[index] for index in indices}

    def _land(self, most: int) -> None:
        """Wait until at most `most` micro-batches are on the device, and take the tokens of the completed ones."""
        while len(self._computed) > most:
            self._take()

    def _take(self) -> None:
        flight = self._computed.popleft()
        result = self._worker.complete(flight.launched)
        if result is not None:
            self._outputs.give(flight.receivers, result, flight.launched.batch.prompt_logprobs)
