"""Continuation: predicts how a running engine goes on with its current sequences, by the event simulator."""

from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from xcore.batching import Sequence
from xcore.specs.schedule import Schedule
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.event_queue import run
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica, micro_batching_of


@dataclass(frozen=True)
class Standing:
    """The present state of a sequence."""

    input_tokens: int
    max_output: int
    ends: int
    """Output tokens after which the sequence is assumed to end."""
    generated: int = 0
    """Output tokens so far; 0: the sequence waits."""
    keys: Items[Hashable] = ()
    """With prefix caching: a key for each full block of its prompt, equal for equal prefixes."""
    held: int = 0
    """Cached tokens of its prompt that are kept for it while it waits."""
    arrival_s: float = 0.0
    """When it arrived, in seconds from now, so at most 0: waiting sequences of several models are compared by it."""


@dataclass(frozen=True)
class Continued:
    """When a sequence is prefilled and when it ends: seconds from now; None: beyond the horizon."""

    start_s: float | None
    finish_s: float | None


def continue_from(
    schedule: Schedule, replica_cost: ReplicaCost, standing: Items[Standing], horizon_s: float
) -> list[Continued]:
    """Predict the start and end of one replica's sequences.

    `standing` holds first the running and then the waiting sequences. A sequence in prefill counts as the first waiting
    one. All stages count as free at once, since their present work is not known here.
    """
    micro_batching = replace(micro_batching_of(schedule), replicas=1)
    record = Record(len(standing), micro_batching.index, replica_cost.encoder_decoder)
    replica = Replica(schedule, replica_cost, record, micro_batching)
    for index, at in enumerate(standing):
        # A waiting sequence counts on no other blocks than those that are kept for it.
        keys = at.keys if at.generated else at.keys[: at.held // schedule.block_size]
        sequence = Sequence(index, at.input_tokens, at.max_output, 0.0, max(at.ends, at.generated + 1), keys)
        if at.generated and replica.ledger.seat(sequence, at.generated):
            record.began(index)
            continue
        if at.generated:  # no blocks for it: the engine prefills its prompt and output again
            sequence.recompute(replica_cost.encoder_decoder)
        replica.ledger.submit([sequence])
        replica.ledger.keep(sequence, at.held)
    run([replica], horizon_s)
    finish = {served.index: served.finish_s for served in record.served}
    return [Continued(record.start_of(index), finish.get(index)) for index in range(len(standing))]
