"""The lane of a rank that has its GPU for itself: the next step is queued while the current one is computed.

Sampled tokens stay on the device, where the next step takes them; the host gets them a step later.
So a stop token ends its sequence a step later too, as on a pipeline.
"""

from dataclasses import dataclass

from xcore.batching import MicroBatch, Step
from xrunner.core.engine_lanes import OwnLane
from xrunner.rank.running import RunningRequest
from xrunner.rank.worker import LaunchedBatch


@dataclass(frozen=True)
class _Flight:
    """A micro-batch on the device."""

    receivers: list[RunningRequest]
    on_device: LaunchedBatch


class AheadLane(OwnLane):
    """The lane of a rank that has its GPU for itself."""

    def run(self, step: Step, now: float) -> None:
        """Queue a step that was decided at `now`; at most one earlier micro-batch is still computed then."""
        for micro_batch in self._micro_batching.split(step):
            self._land(1)
            sampled = self._sampled(micro_batch)
            batch, receivers = self._assemble(micro_batch, sampled)
            self._flying.append(_Flight(receivers, self._worker.launch(batch, now)))

    def update(self) -> bool:
        """Take the tokens that have arrived. Return whether there were any."""
        count = len(self._flying)
        while self._flying and self._worker.is_complete(self._flying[0].on_device):
            self._take()
        return len(self._flying) < count

    def _sampled(self, micro_batch: MicroBatch) -> dict[int, int]:
        """Return where a micro-batch's missing input tokens are among the tokens sampled last, by sequence index.

        If other tokens are missing (of a prompt or a preempted sequence, or for a penalty or a grammar), wait for all
        of them.
        """
        short = [request for request, end in self._needs(micro_batch) if not request.ended and request.known < end]
        if not short:
            return {}
        places = {request.sequence.index: place for place, request in enumerate(self._flying[-1].receivers)}
        decoding = {s.index for s in micro_batch.decode if not s.behind}
        indices = [request.sequence.index for request in short]
        if any(request.needs_output for request in short) or not decoding.intersection(places).issuperset(indices):
            self._land(0)
            return {}
        return {index: places[index] for index in indices}

    def _land(self, most: int) -> None:
        """Wait until at most `most` micro-batches are on the device, and take the tokens of the completed ones."""
        while len(self._flying) > most:
            self._take()

    def _take(self) -> None:
        flight = self._flying.popleft()
        result = self._worker.complete(flight.on_device)
        if result is not None:
            self._outputs.give(flight.receivers, result, flight.on_device.batch.prompt_logprobs)
