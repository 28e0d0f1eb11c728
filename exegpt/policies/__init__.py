"""Policies: what to do next. Each file decides one policy's next iteration from a ledger; the event simulator and the
runner both follow it.
"""

from typing import Protocol

from exegpt.batching import BlockPool, Ledger, Order, Step
from exegpt.errors import InputError
from exegpt.policies.adjustment import Adjustment
from exegpt.policies.chunked import ChunkedPolicy
from exegpt.policies.hybrid import HybridPolicy
from exegpt.policies.orca import OrcaPolicy
from exegpt.policies.rra import RRAPolicy
from exegpt.policies.static import StaticPolicy
from exegpt.policies.waa import WAAPolicy
from exegpt.schedule import Schedule

__all__ = ["Policy", "WAAPolicy", "make_ledger", "make_policy"]


class Policy(Protocol):
    """Decides the next iteration."""

    early_termination: bool

    def next_step(self, ledger: Ledger, now: float) -> Step | None:
        """The next iteration at time `now` (seconds), or None while nothing can run before another request arrives."""


def make_policy(schedule: Schedule, adjustment: float | None = None) -> Policy | WAAPolicy:
    """The policy that a schedule names, with its control variables.

    With an `adjustment`, RRA and WAA pick batches that miss their targets by no more than this share, if they can
    (paper section 5.2). InputError for chunked prompts where an encoder reads them whole.
    """
    spec = schedule.model.spec
    if schedule.policy == "chunked" and spec.encoder_layers:
        raise InputError(
            f"Policy 'chunked' can't split the prompts of model '{spec.name}', whose encoder reads them whole: take "
            "another, orca for one."
        )
    match schedule.policy:
        case "static":
            return StaticPolicy(schedule.encode_batch or 0)
        case "hybrid":
            return HybridPolicy(schedule.encode_batch or 0)
        case "orca":
            return OrcaPolicy(schedule.max_num_seqs or 0, schedule.prefills_per_step or 0)
        case "chunked":
            return ChunkedPolicy(schedule.max_num_seqs or 0, schedule.max_num_batched_tokens or 0)
        case "rra":
            return RRAPolicy(
                schedule.encode_batch or 0, schedule.decode_iterations or 0, _adjustment(schedule, adjustment)
            )
        case "waa-c" | "waa-m":
            return WAAPolicy(schedule.encode_batch or 0, _adjustment(schedule, adjustment))


def _adjustment(schedule: Schedule, threshold: float | None) -> Adjustment | None:
    if threshold is None:
        return None
    if not 0 <= threshold <= 1:
        raise InputError(f"The adjustment is {threshold}: it must be a share, from 0 to 1.")
    return Adjustment(threshold, schedule.workload.input.mean, schedule.encode_batch or 0, schedule.decode_batch or 0)


def make_ledger(schedule: Schedule, policy: Policy | WAAPolicy, order: Order) -> Ledger:
    """An empty ledger over the schedule's KV blocks."""
    pool = BlockPool(schedule.kv_blocks, schedule.block_size)
    return Ledger(pool, order, policy.early_termination, schedule.model.spec.encoder_layers > 0)
