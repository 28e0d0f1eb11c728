"""One replica's requests through the lanes in Python, where event_loop.c was not compiled: slower, the same times."""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf, nan

import numpy as np

from xcore.arrays import Array
from xcore.batching import Ledger, PrefixPool, Sequence, Step
from xcore.batching.step import StagePhase
from xcore.orders import fcfs
from xcore.policies import Policy
from xcore.policies.adjustment import Adjustment
from xcore.policies.from_schedule import make_policy
from xcore.policies.joining import Joining
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xcore.traces.prefixes import Prefixes
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.event_queue import events
from xsimulator.replay.following_turns import Agents
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica
from xsimulator.replay.watch import Watch


@dataclass(frozen=True)
class SharedTexts:
    """The prefixes that prompts share, if prefixes are cached."""

    prefixes: Prefixes | None
    warm: list[int]
    """Tokens of each prompt from a text that stays in the cache; empty: there is no such text."""


@dataclass
class _Noting:
    """A policy that also records the batch and the blocks that its steps use."""

    policy: Policy
    used: Array
    resident: bool
    """Whether the batch is of residents, instead of the prompts of a step."""
    adjustment: Adjustment | None
    """How the policy adjusts its batches, if it does."""

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """Return the policy's next step."""
        step = self.policy.next_step(ledger, now, phase)
        if phase != "decode":
            batch = ledger.residents if self.resident else len(step.encode) if step else 0
            candidates = self.adjustment.most_candidates if self.adjustment else 0
            self.used[:] = np.maximum(self.used, (batch, ledger.pool.total - ledger.pool.available, candidates))
        return step


class _Missed:
    """Counts the requests that miss bounds: as soon as that is certain."""

    def __init__(self, requests: list[RequestLengths], flags: list[int], record: Record, watch: Watch):
        self._requests, self._flags, self._record, self._watch = requests, flags, record, watch
        self._first = self._last = self._seen = 0
        self._finish = [nan] * len(requests)

    def broken(self, now: float) -> bool:
        """Return whether a bound is certainly broken at `now`."""
        watch, served = self._watch, self._record.served
        for one in served[self._seen :]:
            self._finish[one.index] = one.finish_s
            if self._flags[one.index] & 1 and one.output_tokens > 1:
                watch.missed[1] += (one.finish_s - one.first_token_s) / (one.output_tokens - 1) > watch.limits[1]
        self._seen = len(served)
        self._first = self._past(self._first, now, 0, 1, self._record.first_of)
        self._last = self._past(self._last, now, 2, 2, self._finish.__getitem__)
        return any(missed > most for missed, most in zip(watch.missed.tolist(), watch.allowed.tolist(), strict=True))

    def _past(self, place: int, now: float, bound: int, flag: int, when: Callable[[int], float]) -> int:
        """Count the requests from `place` on whose time for a bound is over; return the first whose time isn't."""
        limit = self._watch.limits[bound]
        while place < len(self._requests) and now - self._requests[place].arrival_s > limit:
            in_time = when(place) - self._requests[place].arrival_s <= limit
            self._watch.missed[bound] += bool(self._flags[place] & flag) and not in_time
            place += 1
        return place


def run(
    schedule: Schedule,
    replica_cost: ReplicaCost,
    requests: list[RequestLengths],
    flags: list[int],
    steps: list[int] | None,
    received: list[int],
    texts: SharedTexts,
    agents: Agents | None,
    watch: Watch,
    figures: Array,
    busy: Array,
) -> float | None:
    """Run one replica's requests to completion; arguments and result as of event_loop.pyi."""
    size = schedule.block_size
    micro_batching = schedule.control.micro_batching(len(replica_cost.decode.stages))
    record = Record(len(requests), micro_batching.index, replica_cost.encoder_decoder)
    policy = make_policy(schedule)
    joining = getattr(policy, "joining", None)
    adjustment = joining.adjustment if isinstance(joining, Joining) else None
    noting = _Noting(policy, watch.used, schedule.traits.mixed, adjustment)
    replica = Replica(schedule, replica_cost, record, micro_batching, 0, fcfs, policy=noting)
    sequences = [Sequence(i, one.input, one.output, one.arrival_s, one.output) for i, one in enumerate(requests)]
    prefixes, warm, seen = texts.prefixes, texts.warm, 0

    def submit(i: int, arrival_s: float) -> None:
        sequence = sequences[i]
        sequence.arrival_s, tokens = arrival_s, sequence.input_tokens + sequence.ends
        if steps is not None:
            sequence.speculate(steps[i])
        if received:
            sequence.received = received[i]
        replica.submit(sequence, prefixes.keys(i, tokens, size) if prefixes else None)

    for i, arrival_s in agents.begin() if agents else enumerate(one.arrival_s for one in requests):
        submit(i, arrival_s)
    if prefixes and warm:
        longest = int(np.argmax(warm))
        _keep(replica.ledger, prefixes.keys(longest, warm[longest], size)[: warm[longest] // size])
    missed = _Missed(requests, flags, record, watch)
    for now in events([replica]):
        if missed.broken(now):
            return None
        for ended in record.served[seen:] if agents else ():
            for arrival in agents.after(ended) if agents else ():
                submit(*arrival)
        seen = len(record.served)
    for one in record.served:
        own = sequences[one.index]
        times = one.arrival_s, one.start_s, one.first_token_s, one.finish_s
        figures[one.index] = *times, own.hit, own.reused, own.preemptions
    sides = replica.sides.values()
    worked = {stage.devices: s for side in sides for stage, s in zip(side.stages, side.busy, strict=True)}
    busy[:] = [worked[stage.devices] for stage in schedule.stages]
    return None if missed.broken(inf) else max(side.seconds for side in sides)


def _keep(ledger: Ledger, keys: Items[Hashable]) -> None:
    """Put a text's blocks into the cache for good."""
    assert isinstance(ledger.pool, PrefixPool), "prefixes are cached"
    for block, key in zip(ledger.pool.allocate(len(keys)), keys, strict=True):
        ledger.pool.publish(block, key)
