"""Continuation: how a running engine goes on, by the event simulator, from the sequences that it has now."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from exegpt.batching import MicroBatching, Sequence
from exegpt.orders import fcfs
from exegpt.policies import make_ledger, make_policy
from exegpt.schedule import Schedule
from xsimulator.cost.replica import ReplicaCost
from xsimulator.replay.event_simulator import follow, sides_of
from xsimulator.replay.lanes import KVTransfer, Lane
from xsimulator.replay.record import Record


@dataclass(frozen=True)
class Standing:
    """A sequence as it stands now."""

    input_tokens: int
    max_output: int
    ends: int
    """Output tokens after which it is supposed to end."""
    generated: int = 0
    """0: it waits."""


@dataclass(frozen=True)
class Continued:
    """When a sequence is encoded and ends: seconds from now, None where that is beyond the horizon."""

    start_s: float | None
    finish_s: float | None


def continue_from(
    schedule: Schedule, replica_cost: ReplicaCost, standing: Items[Standing], horizon_s: float
) -> list[Continued]:
    """What becomes of one replica's sequences, those that run first and then those that wait, in this order.

    A sequence that is being encoded counts as waiting in front. Stages are free at once: what is on them now is not
    known here.
    """
    policy, ledger = make_policy(schedule), make_ledger(schedule, fcfs)
    micro_batches = schedule.micro_batches or len(replica_cost.decode.stages)
    micro_batching = MicroBatching(micro_batches, schedule.encode_micro_batches)
    record = Record(len(standing), micro_batching.index, replica_cost.encoder_decoder)
    for index, at in enumerate(standing):
        sequence = Sequence(index, at.input_tokens, at.max_output, 0.0, max(at.ends, at.generated + 1))
        if at.generated and ledger.seat(sequence, at.generated):
            record.began(index)
        else:
            ledger.submit([sequence])
    transfer, sides = KVTransfer(replica_cost), sides_of(replica_cost, micro_batching, False, 0)
    follow([Lane(policy, ledger, record, side, phase, transfer) for phase, side in sides.items()], horizon_s)
    finish = {served.index: served.finish_s for served in record.served}
    return [Continued(record.start_of(index), finish.get(index)) for index in range(len(standing))]
