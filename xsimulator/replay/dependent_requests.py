"""Replays in which a request arrives some time after another one has ended, as the calls of an application's run do."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from itertools import cycle
from typing import NamedTuple, Protocol

from xcore.batching import UNKNOWN, Hints, Order, Preemption, Sequence
from xcore.orders import fcfs
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimes
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xcore.traces.prefixes import Prefixes
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.event_queue import events
from xsimulator.replay.event_simulator import Replay, busy_by_rank, drawn_steps, replay_of
from xsimulator.replay.following_turns import DependentArrival
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica, micro_batching_of


class After(NamedTuple):
    """The arrival of a request that depends on another one."""

    request: int
    """Index of the request that ends before it."""
    seconds: float
    """Seconds from that end to its arrival."""


class ArrivalSource(Protocol):
    """Requests that arrive by themselves, or after others have ended."""

    def begin(self) -> Iterable[DependentArrival]:
        """Return the requests that depend on no other one."""

    def after(self, ended: RequestTimes) -> Iterable[DependentArrival]:
        """Return the requests that arrive since another one has ended."""


class DependentReplay:
    """A schedule's idle replicas in simulated time, and the requests that they may get."""

    def __init__(
        self,
        schedule: Schedule,
        profile: Profile,
        requests: Items[RequestLengths],
        order: Order = fcfs,
        hints: Items[Hints] | None = None,
        step_by_step: bool = True,
        preemption: Preemption | None = None,
    ):
        """Create the replicas.

        Without `step_by_step`, a replica runs to the end of a sequence at once: its requests may depend on no other
        replica, and it must not be disaggregated.
        """
        cost, micro_batching = ReplicaCost.of(schedule, profile), micro_batching_of(schedule)
        self._schedule, self._requests, self._hints = schedule, requests, hints
        self._record = Record(len(requests), micro_batching.index, cost.encoder_decoder, profile.front_end_s)
        self.replicas = [
            Replica(schedule, cost, self._record, micro_batching, number, order, False, step_by_step, None, preemption)
            for number in range(schedule.replicas)
        ]
        self._prefixes = Prefixes.of(requests, schedule.block_size) if schedule.prefix_caching else None
        self._steps = drawn_steps(schedule, requests)

    def run(self, replicas: Items[Replica], arrivals: ArrivalSource) -> None:
        """Run requests on some of the replicas, which take turns in the order in which requests are submitted.

        Dependent requests are submitted when they arrive.
        """
        turns, seen = cycle(replicas), len(self._record.served)
        for arrival in arrivals.begin():
            next(turns).submit(*self._sequence(arrival))
        for _ in events(replicas):
            for served in self._record.served[seen:]:
                for arrival in arrivals.after(served):
                    next(turns).submit(*self._sequence(arrival))
            seen = len(self._record.served)

    def _sequence(self, arrival: DependentArrival) -> tuple[Sequence, list[int] | None]:
        """Return a request's sequence, and the keys of its blocks if prompts share prefixes."""
        place, own = arrival.request, self._requests[arrival.request]
        known = self._hints[place] if self._hints else UNKNOWN
        sequence = Sequence(place, own.input, own.output, arrival.arrival_s, own.output, hints=known)
        if self._steps is not None:
            sequence.speculate(int(self._steps[place]))
        if self._prefixes is None:
            return sequence, None
        return sequence, self._prefixes.keys(place, own.input + own.output, self._schedule.block_size)

    @property
    def result(self) -> Replay:
        """Return the times of all requests that have run."""
        sides = [replica.sides.values() for replica in self.replicas]
        busy = [seconds for pipelines in sides for seconds in busy_by_rank(self._schedule, pipelines)]
        ledgers = [replica.ledger for replica in self.replicas]
        preemptions, reused = (sum(getattr(ledger, count) for ledger in ledgers) for count in ("preemptions", "reused"))
        end_s = max(pipeline.seconds for pipelines in sides for pipeline in pipelines)
        return replay_of(self._schedule, self._record.served, end_s, busy, (), preemptions, reused)


class _Chains:
    """Requests with their arrivals, each perhaps after another one."""

    def __init__(self, requests: Items[RequestLengths], after: Items[After | None]):
        self._own: list[DependentArrival] = []
        self._followers = defaultdict[int, list[After]](list)
        for place in sorted(range(len(requests)), key=lambda place: requests[place].arrival_s):
            if before := after[place]:
                self._followers[before.request].append(After(place, before.seconds))
            else:
                self._own.append(DependentArrival(place, requests[place].arrival_s))

    def begin(self) -> Iterable[DependentArrival]:
        return self._own

    def after(self, ended: RequestTimes) -> Iterator[DependentArrival]:
        for follower in self._followers[ended.index]:
            yield DependentArrival(follower.request, ended.finish_s + follower.seconds)


def replay_dependent(
    schedule: Schedule,
    profile: Profile,
    requests: Items[RequestLengths],
    after: Items[After | None],
    order: Order = fcfs,
    hints: Items[Hints] | None = None,
    preemption: Preemption | None = None,
) -> Replay:
    """Run `requests` through a schedule in simulated time, as `replay`; each may arrive `after` another one has ended.

    Replicas take turns in the order in which requests are submitted; dependent ones are submitted at their arrival.

    Raises:
        InputError: The KV cache cannot hold one of the requests.
    """
    several = schedule.replicas > 1 or schedule.traits.disaggregated
    replaying = DependentReplay(schedule, profile, requests, order, hints, several, preemption)
    replaying.run(replaying.replicas, _Chains(requests, after))
    return replaying.result
