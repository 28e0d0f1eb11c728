"""Continuation: how a running engine goes on, by the event simulator, from the sequences that it has now."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from xcore.batching import Sequence
from xcore.specs.schedule import Schedule
from xsimulator.cost.replica import ReplicaCost
from xsimulator.replay.event_queue import run
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica, micro_batching_of


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
    micro_batching = replace(micro_batching_of(schedule), replicas=1)
    record = Record(len(standing), micro_batching.index, replica_cost.encoder_decoder)
    replica = Replica(schedule, replica_cost, record, micro_batching)
    for index, at in enumerate(standing):
        sequence = Sequence(index, at.input_tokens, at.max_output, 0.0, max(at.ends, at.generated + 1))
        if at.generated and replica.ledger.seat(sequence, at.generated):
            record.began(index)
        else:
            replica.ledger.submit([sequence])
    run([replica], horizon_s)
    finish = {served.index: served.finish_s for served in record.served}
    return [Continued(record.start_of(index), finish.get(index)) for index in range(len(standing))]
