"""Lanes: a replica's pipelines, each of which takes its steps from the policy.

A lane takes a step when its first stage is free or, with two iterations in flight, when its first stage starts the
previous one. If prefill and decoding are disaggregated (WAA), each side has its own lane and decides on its own. A
prefilled batch goes to the decoding lane through host memory, and joins at the next iteration (docs/theory.md).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from xcore.batching import Ledger, Step, Swap
from xcore.batching.step import StagePhase
from xcore.policies import Policy
from xcore.policies.waa import most_underway
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.cells import Pipeline, Ran
from xsimulator.replay.record import Record


class KVTransfer:
    """The KV transfers between the encoding and the decoding lane, and those of swapped sequences, in seconds.

    One batch at a time is on its way to host memory, and one on its way from there. At most one batch waits before
    every encoding stage except the first: more would only hold blocks.
    """

    def __init__(self, replica_cost: ReplicaCost):
        self._replica_cost = replica_cost
        self._arrived = 0.0
        """When the last batch reached the decoding lane."""
        most = most_underway(len(replica_cost.encode.stages))
        self._outs = deque([0.0] * most, maxlen=most)
        """When the last batches left the encoding lane, as many as may be in flight on it."""

    def send(self, step: Step, ran: Ran) -> float:
        """Set when a prefilled batch is ready to decode; return when the next one may be prefilled."""
        out, seconds = max(ran.encoded.values()), self._replica_cost.kv_transfer_seconds(step.tokens)
        self._arrived = max(out + seconds, self._arrived + seconds / 2)
        for sequence, _ in step.encode:
            sequence.kv_arrived_s = self._arrived
        self._outs.append(out)
        return max(ran.next_s, self._outs[0])

    def swap_seconds(self, swaps: Iterable[Swap]) -> float:
        """Return the seconds of all copies between the cache and the host before a step, one after the other."""
        return sum(self._replica_cost.swap_seconds(swap.tokens) for swap in swaps if swap.to != "nowhere")


@dataclass(eq=False, slots=True)
class Lane:
    """A pipeline that runs one step after the other. Times are in seconds.

    A prefill is booked in the ledger when it is decided. If there is another lane, decoding is booked when it ends: the
    other lane reads the generated tokens, and may wait for the blocks that decoding frees.
    """

    policy: Policy
    ledger: Ledger
    record: Record
    pipeline: Pipeline
    phase: StagePhase
    transfer: KVTransfer
    """The transfer to the lane that decodes, if another lane does."""
    step_by_step: bool = False
    at: float = 0.0
    """When the lane next decides or ends a step; infinite while it waits for another lane."""
    waits: bool = False
    """Whether the lane had nothing to run at its last decision."""
    _running: tuple[Step, Ran] | None = field(default=None, init=False)
    """The step that ends at `at`, and its times."""
    _outs: deque[float] = field(default_factory=deque, init=False)
    """When the last token-giving steps left the pipeline, as many as may be in flight."""

    @property
    def event(self) -> tuple[float, int]:
        """Return when the lane acts next, and its rank among lanes at the same time.

        Steps end first; then the lane that admits decides.
        """
        return self.at, 0 if self._running else 2 if self.phase == "decode" else 1

    def wake(self, now: float) -> None:
        """Make a waiting lane decide at `now`."""
        if self.waits:
            self.at = now

    def act(self, now: float, until: float) -> bool:
        """End the running step, or run the next one.

        Equal iterations run together while the next one is decided before `until`, the time at which another lane acts.

        Returns:
            Whether waiting lanes may now have something to run.
        """
        if self._running is None:
            ledger = self.ledger
            if ledger.leaving and now >= self.pipeline.seconds:
                ledger.settle()
            ledger.observe(now)
            step = self.policy.next_step(ledger, now, self.phase)
            preempted = ledger.giving_way.take_preempted()
            freed = bool(preempted)
            if freed:
                until = now  # another lane may then admit the victims before a whole row of decode steps would end
                for victim in preempted:
                    victim.last_token_s = self.pipeline.last_token_s(victim)
            self.waits = step is None
            if step is None:
                self.at = self._next_arrival(now)
                return freed
            if step.arrivals:
                until = min(until, self._next_arrival(now))
            if swaps := ledger.giving_way.take_swaps():
                self.pipeline.hold(now, self.transfer.swap_seconds(swaps))
            self.record.start(step, self.pipeline.start_s(now))
            once = self.step_by_step or self._out(most_underway(len(self.pipeline.stages)) - 1) > now
            ran = self.pipeline.run(step, now, 1 if once else ledger.repeats(step, preempted), until)
            if ran.iterations > 1:
                ledger.extend(step, ran.iterations)
            self.at = self.transfer.send(step, ran) if self.phase == "encode" else self._next_decision(step, ran)
            if self.phase == "decode":
                if ran.iterations > 1:  # all but the last iteration end before another lane acts
                    ledger.advance(step, ran.iterations - 1)
                self._running = step, ran
                return freed
            finished = ledger.advance(step, ran.iterations)
        else:
            (step, ran), self._running = self._running, None
            finished = self.ledger.advance(step)
        self.record.book(step, ran, finished)
        return bool(finished or step.encode)

    def _next_decision(self, step: Step, ran: Ran) -> float:
        """Return when the next step is decided.

        Limits the token-giving steps in flight. Prompts wait for no token, so the first stage could otherwise run far
        ahead.
        """
        stages = len(self.pipeline.stages)
        if self.phase != "both" or stages == 1:
            return ran.next_s
        if step.gives_tokens(self.ledger.encoder_decoder):
            self._outs.append(self.pipeline.seconds)
            if len(self._outs) > most_underway(stages):
                self._outs.popleft()
        return max(ran.next_s, self._out(most_underway(stages)))

    def _out(self, back: int) -> float:
        """Return when an earlier step left the pipeline, counting back `back` token-giving steps; 0 if none exists."""
        return self._outs[-back] if 0 < back <= len(self._outs) else 0.0

    def _next_arrival(self, now: float) -> float:
        """Return when the next request, or the next prefilled batch, arrives; infinite if none does."""
        if self.phase == "decode":
            return min([s.kv_arrived_s for s in self.ledger.decoding if s.kv_arrived_s > now], default=inf)
        arrival = self.ledger.waiting.next_arrival(now)
        next_s = inf if arrival is None else arrival
        if self.waits and self.ledger.leaving:
            next_s = min(next_s, self.pipeline.seconds)
        if self.ledger.preemptions:
            first = self.ledger.waiting.peek(now)
            if first is not None and first.last_token_s > now:
                return min(next_s, first.last_token_s)
        return next_s
