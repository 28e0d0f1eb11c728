"""Encoding and decoding on stages of their own (WAA), followed event by event (docs/theory.md).

Each side decides when its first stage is free, whatever the other does. An encoded batch goes to the decoding side
through host memory, one batch after the other on the way there and one on the way back; it joins at the first
iteration after. On the encoding side no more than one batch waits before every stage but the first: more would only
hold blocks.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from exegpt.batching import Ledger, Step
from exegpt.policies import DisaggregatedPolicy
from exegpt.policies.waa import most_underway
from xsimulator.replay.cells import Pipeline, Ran
from xsimulator.replay.record import Record
from xsimulator.steady.kv_transfer import kv_transfer_seconds
from xsimulator.steady.scenario import Scenario


@dataclass
class Disaggregated:
    """Two sides of one ledger while requests run through them. Times in seconds."""

    scenario: Scenario
    policy: DisaggregatedPolicy
    ledger: Ledger
    encode: Pipeline
    decode: Pipeline
    record: Record
    step_by_step: bool = False
    _encode_at: float = 0.0
    """When the encoding side decides next; endless while it waits for blocks."""
    _encode_waits: bool = False
    """Whether it had nothing to encode, or no blocks for it, when it last decided."""
    _decode_at: float = inf
    """When the decoding side decides next; endless while nobody is on the way to it."""
    _decoding: tuple[Step, Ran] | None = None
    """What the decoding side is at, until `_decode_at`."""
    _arrived: float = 0.0
    """When the last batch had reached the decoding side."""
    _outs: deque[float] = field(init=False)
    """When the last batches left the encoding side, as many as may be under way on it."""

    def __post_init__(self) -> None:
        self._outs = deque(maxlen=most_underway(len(self.encode.stages)))

    def run(self) -> None:
        """Until nobody waits and nobody is resident."""
        while not self.ledger.idle:
            now = min(self._decode_at, self._encode_at)
            if now == inf:
                raise RuntimeError("a waiting request can never be admitted")  # submit() refuses those
            if self._decode_at == now:
                self._book_decoding(now)
            if self._encode_at <= now:
                self._decide_encoding(now)
            if self._decode_at <= now:
                self._decide_decoding(now)

    def _book_decoding(self, now: float) -> None:
        """What was decoded until now frees blocks, which the encoding side may wait for."""
        if self._decoding is None:
            return
        step, ran = self._decoding
        finished = self.ledger.advance(step, iterations=ran.iterations)
        self.record.book(step, ran, finished)
        self._decoding = None
        if finished and self._encode_waits:
            self._encode_at = now

    def _decide_encoding(self, now: float) -> None:
        step = self.policy.next_encode(self.ledger, now)
        self._encode_waits = step is None
        if step is None:
            arrival = self.ledger.waiting.next_arrival(now)
            self._encode_at = inf if arrival is None else arrival
            return
        self.record.start(step, now)
        ran = self.encode.run(step, now)
        out, transfer = max(ran.encoded.values()), kv_transfer_seconds(self.scenario, step.tokens)
        self._arrived = max(out + transfer, self._arrived + transfer / 2)
        for sequence, _ in step.encode:
            sequence.ready_s = self._arrived
        self.record.book(step, ran, self.ledger.advance(step))
        self._outs.append(out)
        earliest = self._outs[0] if len(self._outs) == self._outs.maxlen else 0.0
        self._encode_at = max(ran.next_s, earliest)
        if self._decode_at == inf:
            self._decode_at = self._arrived

    def _decide_decoding(self, now: float) -> None:
        step = self.policy.next_decode(self.ledger, now)
        arrives = min([s.ready_s for s in self.ledger.decoding if s.ready_s > now], default=inf)
        if step is None:
            self._decode_at = arrives
            return
        most = 1 if self.step_by_step else step.repeats
        ran = self.decode.run(step, now, most, min(arrives, self._encode_at))
        self._decoding, self._decode_at = (step, ran), ran.next_s
