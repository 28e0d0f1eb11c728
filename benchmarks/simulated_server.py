"""A server in simulated time: admission control in front of a replica of the event simulator, by one clock."""

import asyncio
import heapq
import math
from dataclasses import dataclass

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
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica, micro_batching_of

TABLE_S = 0.1
"""Simulated seconds between two of admission's tables; their computation takes no simulated time."""


@dataclass(frozen=True, order=True)
class _Message:
    """The engine's message with a sequence's new tokens."""

    at_s: float
    index: int
    tokens: int
    """All of the sequence's tokens so far."""
    ended: bool


class SimulatedServer:
    """Admission control whose engine is a replica in simulated time, with the true lengths."""

    def __init__(self, schedule: Schedule, profile: Profile, requests: int, order: Order = fcfs):
        """Create an idle server for at most `requests` requests, whose indices are less than that."""
        cost, micro_batching = ReplicaCost.of(schedule, profile), micro_batching_of(schedule)
        self._record = Record(requests, micro_batching.index, cost.encoder_decoder)
        self._replica = Replica(schedule, cost, self._record, micro_batching, order=order, step_by_step=True)
        self.now_s, self._next_table_s = 0.0, 0.0
        self._running: dict[int, tuple[Output, Sequence]] = {}
        self._told: dict[int, int] = {}
        """By running sequence: its tokens in all messages, received and pending."""
        self._messages: list[_Message] = []
        """A heap of pending messages: an iteration is booked when it begins, and its tokens arrive when it ends."""
        self.finished: list[tuple[Output, float]] = []
        """Finished requests, and when their last tokens came."""
        opened = Opened(schedule, profile, None, (), 0.0)
        self.admission = Admission(opened, self._outputs, 1000, lambda: self.now_s)

    def _outputs(self) -> list[Output]:
        return [output for output, _ in self._running.values()]

    def run(self, until: float = math.inf) -> None:
        """Run the engine up to a time in seconds, or until nothing is left."""
        while (now_s := min(self._replica.next_event(), self._next_message_s)) <= until and now_s < math.inf:
            self.now_s = now_s
            if self._next_message_s <= now_s:
                self._receive()
            else:
                self._replica.act(now_s)
                self._send_tokens()
        if until < math.inf:
            self.now_s = until

    @property
    def _next_message_s(self) -> float:
        return self._messages[0].at_s if self._messages else math.inf

    def _send_tokens(self) -> None:
        """Send the tokens that have been booked at this event."""
        both = self._replica.sides.get("both")
        for index, (_, sequence) in self._running.items():
            if sequence.generated > self._told.get(index, 0):
                at_s = self._record.first_of(index) if sequence.generated == 1 else both.seconds if both else self.now_s
                message = _Message(max(at_s, self.now_s), index, sequence.generated, sequence.status is FINISHED)
                heapq.heappush(self._messages, message)
                self._told[index] = sequence.generated

    def _receive(self) -> None:
        """Report the tokens that have come, and the ends, to admission."""
        ended = []
        while self._next_message_s <= self.now_s:
            message = heapq.heappop(self._messages)
            output, _ = self._running[message.index]
            output.first_s, output.last_s = output.first_s or self.now_s, self.now_s
            output.tokens = [0] * message.tokens
            if message.ended:
                ended.append(message.index)
        for index in ended:
            output, _ = self._running.pop(index)
            self.admission.ended(output)
            self.finished.append((output, self.now_s))
        self.admission.stepped()
        if self.now_s >= self._next_table_s:
            self._next_table_s = self.now_s + TABLE_S
            asyncio.run(self.admission.update())

    def send(self, request: Request, output_tokens: int, score: float | None = None) -> Promise:
        """Send a request, whose id is its index and whose true length is `output_tokens`; ApiError if it is refused."""
        inputs = len(request.prompt_ids)
        promise = self.admission.admit([(inputs, request.max_tokens)], self.now_s)
        hints = Hints(score=score, slack_s=promise.slack_s)
        sequence = Sequence(int(request.id), inputs, request.max_tokens, self.now_s, output_tokens, hints=hints)
        self._running[sequence.index] = Output(request, added_s=self.now_s, due_s=promise.due_s), sequence
        self._replica.submit(sequence)
        return promise
