"""The policy and the ledger that a schedule asks for, checked."""

from xcore.batching import BlockPool, Ledger, Order, Preemption, PrefixPool
from xcore.batching.admission import ADMISSIONS
from xcore.batching.kv_pool import KVPool
from xcore.errors import InputError
from xcore.policies import TRAITS
from xcore.policies.adjustment import Adjustment
from xcore.policies.control import Policy, PolicyContext
from xcore.specs.schedule import Schedule


def checked(schedule: Schedule) -> Schedule:
    """Return the schedule; InputError unless its stages and its cache are possible with its policy."""
    traits = schedule.traits
    phases = {stage.phase for stage in schedule.stages}
    if phases != ({"encode", "decode"} if traits.disaggregated else {"both"}):
        raise InputError(
            f"A schedule of policy {traits.name} can't have stages of phase {', '.join(sorted(phases))}: only WAA "
            "has separate stages for encode and decode; with other policies each stage does both."
        )
    _check_cache(schedule)
    return schedule


def _check_cache(schedule: Schedule) -> None:
    """Raise InputError if the schedule uses admission grow or prefix caching, but its policy doesn't support it."""
    traits = schedule.traits
    if ADMISSIONS[schedule.admission].grows and not traits.grows:
        growing = ", ".join(traits.name for traits in TRAITS.values() if traits.grows)
        raise InputError(
            f"Policy {traits.name} can't use admission '{schedule.admission}': pass --admission reserve, or choose one "
            f"of {growing}."
        )
    if schedule.prefix_caching and (schedule.model.spec.encoder_layers or not traits.caches_prefixes):
        caching = ", ".join(traits.name for traits in TRAITS.values() if traits.caches_prefixes)
        raise InputError(
            f"Policy {traits.name} can't cache prefixes with model '{schedule.model.spec.name}': remove "
            f"--prefix-caching, or use a decoder-only model with {caching}."
        )


def make_policy(schedule: Schedule) -> Policy:
    """Build the policy that a schedule names, with its control variables.

    If the schedule is adjusted, a policy with a target chooses batches near it (paper section 5.2).

    Raises:
        InputError: The schedule is not possible with its policy, or the policy splits prompts that an encoder reads
            whole.
    """
    traits, spec = checked(schedule).traits, schedule.model.spec
    if traits.splits_prompts and spec.encoder_layers:
        raise InputError(
            f"Policy '{traits.name}' can't split the prompts of model '{spec.name}', because its encoder reads a "
            "whole prompt at once: choose another policy, for example orca."
        )
    context = PolicyContext(schedule.workload, schedule.admission, _encode_stages(schedule), adjustment_of(schedule))
    return schedule.control.make(context)


def _encode_stages(schedule: Schedule) -> int:
    return sum(stage.phase == "encode" for stage in schedule.stages)


def adjustment_of(schedule: Schedule) -> Adjustment | None:
    """Return the adjustment of a schedule's batches, before the first one; None if they aren't adjusted."""
    if schedule.adjust is None or not schedule.traits.adjustable:
        return None
    prompts, target = schedule.control.of_kind("prompts"), schedule.control.of_kind("target")
    assert prompts and target, "a policy with a target must limit the prompts of a batch"
    return Adjustment(schedule.adjust, schedule.workload.input.mean, prompts, target, _encode_stages(schedule))


def most_prompts(schedule: Schedule) -> int | None:
    """Return the most prompts that are prefilled at once; None if only the residents limit them."""
    adjustment = adjustment_of(schedule)
    return adjustment.most if adjustment else schedule.control.of_kind("prompts")


def shares_in_step(schedule: Schedule) -> bool:
    """Return whether a sequence may use a prefix that another sequence computes in the same step.

    This needs steps of one micro-batch. Otherwise the sequence could overtake the prefix.
    """
    return schedule.control.micro_batching(len(schedule.stages)).count == 1


def drafted_of(schedule: Schedule) -> int:
    """Return the draft tokens of each sequence in a decode iteration; 0 without speculation."""
    return schedule.speculation.drafted if schedule.speculation else 0


def check_preemption(schedule: Schedule) -> None:
    """Raise InputError if running sequences of the schedule can't give way to waiting ones."""
    traits = schedule.traits
    if not traits.gives_way:
        yielding = ", ".join(traits.name for traits in TRAITS.values() if traits.gives_way)
        raise InputError(
            f"Under policy {traits.name}, running requests can't give way: leave --preempt out, or choose one of "
            f"{yielding}."
        )
    if schedule.model.spec.encoder_layers:
        raise InputError(
            f"'{schedule.model.spec.name}' is an encoder-decoder, whose running requests can't give way: leave "
            "--preempt out."
        )


def make_ledger(
    schedule: Schedule,
    order: Order,
    pool: KVPool | None = None,
    lingering: bool = False,
    preemption: Preemption | None = None,
) -> Ledger:
    """Build an empty ledger over a pool, by default of the schedule's KV blocks; see `Ledger` for the others.

    Raises:
        InputError: The schedule asks for growth, prefixes or preemption that its policy doesn't have.
    """
    traits, encoder_decoder = schedule.traits, schedule.model.spec.encoder_layers > 0
    _check_cache(schedule)
    if preemption:
        check_preemption(schedule)
    kind_of_pool = PrefixPool if schedule.prefix_caching else BlockPool
    pool = pool or kind_of_pool(schedule.kv_blocks, schedule.block_size)
    kind = {
        "early_termination": traits.early_termination,
        "disaggregated": traits.disaggregated,
        "shares_in_step": shares_in_step(schedule),
        "lingering": lingering,
    }
    rules = {"encoder_decoder": encoder_decoder, **kind}
    drafted = drafted_of(schedule)
    return Ledger(pool, order, **rules, admission=schedule.admission, drafted=drafted, preemption=preemption)
