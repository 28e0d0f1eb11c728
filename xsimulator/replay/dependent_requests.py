"""Replays in which a request arrives some time after another one has ended, as the calls of an application's run do."""

from collections import defaultdict
from collections.abc import Sequence as Items
from itertools import cycle
from typing import NamedTuple

from xcore.batching import UNKNOWN, Hints, Order, Sequence
from xcore.orders import fcfs
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xcore.traces.prefixes import Prefixes
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.event_queue import events
from xsimulator.replay.event_simulator import Replay, busy_by_rank, drawn_steps, replay_of
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica, micro_batching_of


class After(NamedTuple):
    """The arrival of a request that depends on another one."""

    request: int
    """Index of the request that ends before it."""
    seconds: float
    """Seconds from that end to its arrival."""


def replay_dependent(
    schedule: Schedule,
    profile: Profile,
    requests: Items[RequestLengths],
    after: Items[After | None],
    order: Order = fcfs,
    hints: Items[Hints] | None = None,
) -> Replay:
    """Run `requests` through a schedule in simulated time, as `replay`; each may arrive `after` another one has ended.

    Replicas take turns in the order in which requests are submitted; dependent ones are submitted at their arrival.

    Raises:
        InputError: The KV cache cannot hold one of the requests.
    """
    cost, micro_batching = ReplicaCost.of(schedule, profile), micro_batching_of(schedule)
    record = Record(len(requests), micro_batching.index, cost.encoder_decoder, profile.front_end_s)
    replicas = [
        Replica(schedule, cost, record, micro_batching, number, order, step_by_step=True)
        for number in range(schedule.replicas)
    ]
    prefixes = Prefixes.of(requests, schedule.block_size) if schedule.prefix_caching else None
    steps = drawn_steps(schedule, requests)
    turns, followers = cycle(replicas), defaultdict[int, list[int]](list)

    def submit(place: int, arrival_s: float) -> None:
        own = requests[place]
        known = hints[place] if hints else UNKNOWN
        sequence = Sequence(place, own.input, own.output, arrival_s, own.output, hints=known)
        if steps is not None:
            sequence.speculate(int(steps[place]))
        keys = prefixes.keys(place, own.input + own.output, schedule.block_size) if prefixes else None
        next(turns).submit(sequence, keys)

    for place in sorted(range(len(requests)), key=lambda place: requests[place].arrival_s):
        if own := after[place]:
            followers[own.request].append(place)
        else:
            submit(place, requests[place].arrival_s)
    seen = 0
    for _ in events(replicas):
        for served in record.served[seen:]:
            for place in followers[served.index]:
                waits = after[place]
                assert waits, "a follower depends on a request"
                submit(place, served.finish_s + waits.seconds)
        seen = len(record.served)
    pipelines = [pipeline for replica in replicas for pipeline in replica.sides.values()]
    busy = [seconds for replica in replicas for seconds in busy_by_rank(schedule, replica.sides.values())]
    preemptions, reused = (sum(getattr(r.ledger, count) for r in replicas) for count in ("preemptions", "reused"))
    end_s = max(pipeline.seconds for pipeline in pipelines)
    return replay_of(schedule, record.served, end_s, busy, (), preemptions, reused)
