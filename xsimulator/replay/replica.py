"""Replica: one replica of a schedule in simulated time, with its requests and its lanes."""

from collections.abc import Hashable
from collections.abc import Sequence as Items
from math import inf

from xcore.batching import MicroBatching, Order, Preemption, Sequence
from xcore.batching.step import StagePhase
from xcore.orders import fcfs
from xcore.policies import Policy
from xcore.policies.from_schedule import make_ledger, make_policy
from xcore.specs.schedule import Schedule
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.cells import Pipeline
from xsimulator.replay.lanes import KVTransfer, Lane
from xsimulator.replay.record import Record


def micro_batching_of(schedule: Schedule) -> MicroBatching:
    """Return how steps are split on the decoding stages: one micro-batch per stage unless the schedule sets them."""
    decoding = sum(stage.phase != "encode" for stage in schedule.stages)
    return schedule.control.micro_batching(decoding, schedule.replicas)


def decides_ahead(schedule: Schedule, replica_cost: ReplicaCost) -> bool:
    """Return whether an iteration is decided before the previous one ends: the engine has two in flight.

    Policies that only this project's own engine runs decide synchronously.
    """
    return schedule.traits.mixed and replica_cost.cost_model.profile.in_flight > 1


class Replica:
    """A ledger with a lane for each side of the pipeline; lanes see each other's events. An `Actor`."""

    def __init__(
        self,
        schedule: Schedule,
        replica_cost: ReplicaCost,
        record: Record,
        micro_batching: MicroBatching,
        number: int = 0,
        order: Order = fcfs,
        keep_spans: bool = False,
        step_by_step: bool = False,
        policy: Policy | None = None,
        preemption: Preemption | None = None,
    ):
        """Create an idle replica.

        `number` is the replica's index in the schedule. `policy` decides; None: the schedule's. With `step_by_step`,
        decode steps are not simulated at once, so that requests can be submitted between them. `preemption` as in
        `Ledger`.
        """
        self._schedule = schedule
        ahead = decides_ahead(schedule, replica_cost)
        self.ledger = make_ledger(schedule, order, None, ahead, preemption)
        self.sides = _sides(replica_cost, micro_batching, keep_spans, number, ahead)
        policy, transfer = policy or make_policy(schedule), KVTransfer(replica_cost)
        self._lanes = [
            Lane(policy, self.ledger, record, side, phase, transfer, step_by_step) for phase, side in self.sides.items()
        ]

    @property
    def idle(self) -> bool:
        """Return whether no request waits or runs."""
        return self.ledger.idle

    def next_event(self) -> float:
        """Return when the next lane acts."""
        return min([lane.at for lane in self._lanes])

    def act(self, now: float) -> None:
        """Let the lane with the earliest event act."""
        lane = min(self._lanes, key=lambda lane: lane.event)
        others = [other for other in self._lanes if other is not lane]
        if lane.act(now, min([other.at for other in others], default=inf)):
            for other in others:
                other.wake(now)

    def submit(self, sequence: Sequence, keys: Items[Hashable] | None = None) -> None:
        """Submit a request that arrives no earlier than the last event.

        `keys` are the keys of the full blocks of its prompt and output, if prefixes are cached; None: it shares no
        blocks.
        """
        if self._schedule.prefix_caching:
            sequence.keys = _own_keys(sequence, self._schedule.block_size) if keys is None else keys
        self.ledger.submit([sequence])
        for lane in self._lanes:
            if lane.waits and lane.phase != "decode":
                lane.at = min(lane.at, sequence.arrival_s)


def _own_keys(sequence: Sequence, block_size: int) -> Items[Hashable]:
    """Return a key that no other sequence has for each full block that a sequence may reach."""
    first = sequence.index << 32
    return range(first, first + (sequence.input_tokens + sequence.ends) // block_size)


def _sides(
    replica_cost: ReplicaCost, micro_batching: MicroBatching, keep_spans: bool, number: int, ahead: bool
) -> dict[StagePhase, Pipeline]:
    """Return the pipelines by phase."""
    if not replica_cost.disaggregated:
        return {"both": Pipeline(replica_cost, replica_cost.decode, micro_batching, keep_spans, number, ahead)}
    decode = Pipeline(replica_cost, replica_cost.decode, micro_batching, keep_spans, number)
    encode = Pipeline(replica_cost, replica_cost.encode, MicroBatching(1), keep_spans, number)
    return {"encode": encode, "decode": decode}
