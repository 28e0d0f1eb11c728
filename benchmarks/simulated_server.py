"""A server in simulated time: admission control in front of a replica of the event simulator, by one clock."""

import asyncio
import math

from xcore.batching import Hints, Order, Sequence
from xcore.batching.sequence import FINISHED
from xcore.orders import fcfs
from xcore.requests.engine_protocol import Opened
from xcore.requests.request import Request
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xserver.admission.admission_control import Admission, Promise
from xserver.engines.engine_link import Output
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.event_queue import events
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica, micro_batching_of

TABLE_S = 0.1
"""Simulated seconds between two of admission's tables; their computation takes no simulated time."""


class SimulatedServer:
    """Admission control whose engine is a replica in simulated time, with the true lengths."""

    def __init__(self, schedule: Schedule, profile: Profile, requests: int, order: Order = fcfs):
        """Create an idle server for at most `requests` requests, whose indices are less than that."""
        cost, micro_batching = ReplicaCost.of(schedule, profile), micro_batching_of(schedule)
        record = Record(requests, micro_batching.index, cost.encoder_decoder)
        self._replica = Replica(schedule, cost, record, micro_batching, order=order, step_by_step=True)
        self.now_s, self._next_table_s = 0.0, 0.0
        self._running: dict[int, tuple[Output, Sequence]] = {}
        self.finished: list[tuple[Output, float]] = []
        """Finished requests, and when their last tokens came."""
        opened = Opened(schedule, profile, None, (), 0.0)
        self._admission = Admission(opened, self._outputs, 1000, lambda: self.now_s)

    def _outputs(self) -> list[Output]:
        return [output for output, _ in self._running.values()]

    def run(self, until: float = math.inf) -> None:
        """Run the engine up to a time in seconds, or until nothing is left."""
        for now_s in events([self._replica], until):
            self.now_s = now_s
            self._receive()
        if until < math.inf:
            self.now_s = until

    def _receive(self) -> None:
        """Report the engine's tokens and ends to admission."""
        for index, (output, sequence) in list(self._running.items()):
            if sequence.generated > len(output.tokens):
                output.first_s, output.last_s = output.first_s or self.now_s, self.now_s
                output.tokens = [0] * sequence.generated
            if sequence.status is FINISHED:
                del self._running[index]
                self._admission.ended(output)
                self.finished.append((output, self.now_s))
        self._admission.stepped()
        if self.now_s >= self._next_table_s:
            self._next_table_s = self.now_s + TABLE_S
            asyncio.run(self._admission.update())

    def send(self, request: Request, output_tokens: int, score: float | None = None) -> Promise:
        """Send a request, whose id is its index and whose true length is `output_tokens`; ApiError if it is refused."""
        inputs = len(request.prompt_ids)
        promise = self._admission.admit([(inputs, request.max_tokens)], self.now_s)
        hints = Hints(score=score, slack_s=promise.slack_s)
        sequence = Sequence(int(request.id), inputs, request.max_tokens, self.now_s, output_tokens, hints=hints)
        self._running[sequence.index] = Output(request, added_s=self.now_s, due_s=promise.due_s), sequence
        self._replica.submit(sequence)
        return promise
