"""Record: the times at which each simulated request started, gave its first token and finished."""

from collections.abc import Callable, Iterable
from math import nan

from xcore.batching import Sequence, Step
from xcore.specs.request_times import RequestTimes
from xsimulator.replay.cells import Ran


class Record:
    """The times of `requests` requests, in seconds, as they become known.

    `micro_batch` returns the micro-batch of a sequence. `front_end_s` is the time that each request spends outside the
    engine: clients see its tokens that much later.
    """

    def __init__(
        self,
        requests: int,
        micro_batch: Callable[[Sequence], int],
        encoder_decoder: bool,
        front_end_s: float = 0.0,
    ):
        self.served: list[RequestTimes] = []
        """Served requests in order of their last steps."""
        self._micro_batch = micro_batch
        self._encoder_decoder = encoder_decoder
        self._front_end_s = front_end_s
        self._started: list[float | None] = [None] * requests
        self._first: list[float | None] = [None] * requests

    def began(self, index: int) -> None:
        """Mark a request whose first token came before the record begins."""
        self._started[index] = self._first[index] = 0.0

    def start_of(self, index: int) -> float | None:
        """Return when a request's prefill started; None if it hasn't."""
        return self._started[index]

    def first_of(self, index: int) -> float:
        """Return when a request's first token came; NaN if it hasn't."""
        first = self._first[index]
        return nan if first is None else first + self._front_end_s

    def start(self, step: Step, now: float) -> None:
        """Record `now` as the start of the prompts whose prefill begins in this step."""
        for sequence, _ in step.encode:
            if self._started[sequence.index] is None:
                self._started[sequence.index] = now

    def book(self, step: Step, ran: Ran, finished: Iterable[Sequence]) -> None:
        """Record the times of a step that has run and is booked in the ledger."""
        for sequence, _ in step.encode:
            if sequence.generated and self._first[sequence.index] is None:
                self._first[sequence.index] = ran.encoded[sequence.index]
        if self._encoder_decoder:
            for sequence in step.decode:
                if self._first[sequence.index] is None:
                    self._first[sequence.index] = float(ran.first[self._micro_batch(sequence)])
        for sequence in finished:
            index = sequence.index
            started, first = self._started[index], self._first[index]
            assert started is not None and first is not None, "a finished request has begun"
            out = ran.encoded[index] if index in ran.encoded else float(ran.last[self._micro_batch(sequence)])
            times = (sequence.arrival_s, started, first + self._front_end_s, out + self._front_end_s)
            counts = (sequence.hit, sequence.preemptions)
            self.served.append(RequestTimes(index, sequence.input_tokens, sequence.output_tokens, *times, *counts))
