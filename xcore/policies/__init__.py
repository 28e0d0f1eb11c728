"""Policies: what to do next. Each file decides one policy's next iteration from a ledger, which the event simulator and
the runner both follow, and has its traits, which everyone else reads.
"""

from collections.abc import Mapping

from xcore.batching import BlockPool, Ledger, Order, PrefixPool
from xcore.batching.kv_pool import KVPool
from xcore.errors import InputError
from xcore.policies import chunked, hybrid, orca, rra, static, waa
from xcore.policies.adjustment import Adjustment
from xcore.policies.traits import Policy, Traits
from xcore.specs.schedule import PIPELINE_VARIABLES, VARIABLES, Schedule
from xcore.specs.workload import MAX_TOKENS

__all__ = [
    "NOT_DEPLOYED",
    "TRAITS",
    "Policy",
    "Traits",
    "check_budget",
    "checked",
    "make_ledger",
    "make_policy",
    "register",
    "runs",
    "shares_in_step",
    "traits_of",
]

TRAITS: dict[str, Traits] = {}
"""Every policy's by its name."""


def register(traits: Traits) -> None:
    """Let schedules name a policy; InputError for a name that is taken, or a variable that schedules don't have."""
    if traits.name in TRAITS:
        raise InputError(f"There is a policy '{traits.name}' already: give this one another name.")
    for name in traits.variables:
        if name not in VARIABLES:
            raise InputError(f"Policy '{traits.name}' has {name}, and schedules have {', '.join(VARIABLES)}.")
    TRAITS[traits.name] = traits


for _traits in (static.TRAITS, hybrid.TRAITS, orca.TRAITS, chunked.TRAITS, rra.TRAITS, waa.WAA_C, waa.WAA_M):
    register(_traits)


NOT_DEPLOYED = ("paper", "none")
"""Presets of no engine that can be deployed: all policies are predicted with the same."""


def runs(engine: str, policy: str) -> bool:
    """Return whether an engine, by its preset's name, runs a policy."""
    return engine in NOT_DEPLOYED or engine in TRAITS[policy].engines


def traits_of(schedule: Schedule) -> Traits:
    """The traits of a schedule's policy; InputError for an unknown one."""
    if schedule.policy not in TRAITS:
        raise InputError(f"There is no policy '{schedule.policy}': use one of {', '.join(TRAITS)}.")
    return TRAITS[schedule.policy]


def checked(schedule: Schedule) -> Schedule:
    """The schedule; InputError unless it has its policy's variables, and stages for the phases that this one has."""
    traits = traits_of(schedule)
    for name in traits.required:
        if not 1 <= (getattr(schedule, name) or 0) <= MAX_TOKENS:
            raise InputError(
                f"A schedule of policy {traits.name} needs {name} from 1 to {MAX_TOKENS:,} "
                f"(got {getattr(schedule, name)})."
            )
    for name in VARIABLES:
        value = getattr(schedule, name)
        if value is not None and name not in {*traits.variables, *PIPELINE_VARIABLES}:
            own = ", ".join(traits.variables)
            raise InputError(
                f"A schedule of policy {traits.name} can't have {name} (got {value}): its variables are {own}; make it "
                "null, or tune again."
            )
        if value is not None and not 1 <= value <= MAX_TOKENS:
            raise InputError(f"A schedule can't have {name} {value}: it must be from 1 to {MAX_TOKENS:,}, or null.")
    phases = {stage.phase for stage in schedule.stages}
    if phases != ({"encode", "decode"} if traits.disaggregated else {"both"}):
        raise InputError(
            f"A schedule of policy {traits.name} can't have stages of phase {', '.join(sorted(phases))}: WAA parts "
            "encode and decode, every other policy does both on each."
        )
    _check_degrees(schedule)
    _check_cache(schedule, traits)
    return schedule


def check_budget(variables: Mapping[str, int]) -> None:
    """InputError for a token budget below the number of sequences, which vLLM refuses."""
    budget, residents = variables.get("max_num_batched_tokens"), variables.get("max_num_seqs")
    if budget is not None and residents is not None and budget < residents:
        raise InputError(
            f"A budget of {budget:,} tokens per iteration can't give {residents:,} sequences a token each: raise "
            "--max-num-batched-tokens or lower --max-num-seqs."
        )


def _check_degrees(schedule: Schedule) -> None:
    """InputError for tensor parallelism other than that of the stages, which are what is run."""
    for prefix, phases in (("", ("both", "decode")), ("encode_", ("encode",))):
        groups = [stage.tp for stage in schedule.stages if stage.phase in phases]
        grouped = [tp for tp in groups if tp > 1]
        of_stages = {"tp_degree": grouped[0] if grouped else 1, "tp_gpus": sum(grouped)}
        for name, of_stage in of_stages.items():
            value = getattr(schedule, prefix + name)
            if value is not None and (not groups or value != of_stage):
                has = f"its stages have {of_stage}" if groups else "only stages of phase encode have it"
                raise InputError(f"A schedule can't have {prefix}{name} {value}: {has}; make it null, or tune again.")


def _check_cache(schedule: Schedule, traits: Traits) -> None:
    """InputError for a policy without growth or prefixes, where the schedule asks for them."""
    if schedule.admission == "grow" and not traits.grows:
        growing = ", ".join(traits.name for traits in TRAITS.values() if traits.grows)
        raise InputError(f"Policy {traits.name} can't have admission 'grow': use --admission reserve, or {growing}.")
    if schedule.prefix_caching and (schedule.model.spec.encoder_layers or not traits.caches_prefixes):
        caching = ", ".join(traits.name for traits in TRAITS.values() if traits.caches_prefixes)
        raise InputError(
            f"Prefixes can't be cached with policy {traits.name} and model '{schedule.model.spec.name}': leave "
            f"--prefix-caching out, or use a decoder-only model with {caching}."
        )


def make_policy(schedule: Schedule, adjustment: float | None = None) -> Policy:
    """The policy that a schedule names, with its control variables.

    With an `adjustment`, those with a target pick batches that miss it by no more than this share, if they can (paper
    section 5.2). InputError for a schedule that isn't its policy's, or split prompts where an encoder reads them whole.
    """
    traits, spec = traits_of(checked(schedule)), schedule.model.spec
    if traits.splits_prompts and spec.encoder_layers:
        raise InputError(
            f"Policy '{traits.name}' can't split the prompts of model '{spec.name}', whose encoder reads them whole: "
            "take another, orca for one."
        )
    return traits.make(schedule, _adjustment(schedule, adjustment) if traits.adjustable else None)


def _adjustment(schedule: Schedule, threshold: float | None) -> Adjustment | None:
    if threshold is None:
        return None
    if not 0 <= threshold <= 1:
        raise InputError(f"The adjustment is {threshold}: it must be a share, from 0 to 1.")
    encode, decode = schedule.variable("encode_batch"), schedule.variable("decode_batch")
    return Adjustment(threshold, schedule.workload.input.mean, encode, decode)


def shares_in_step(schedule: Schedule) -> bool:
    """Return whether a sequence may use a prefix that another one computes in the same step: where a step is one
    micro-batch. Otherwise the sequence could overtake the prefix.
    """
    return (schedule.micro_batches or len(schedule.stages)) == 1


def make_ledger(schedule: Schedule, order: Order, pool: KVPool | None = None, lingering: bool = False) -> Ledger:
    """An empty ledger over a pool, by default the schedule's KV blocks; `lingering` as of `Ledger`. InputError for a
    policy without growth or prefixes.
    """
    traits, encoder_decoder = traits_of(schedule), schedule.model.spec.encoder_layers > 0
    _check_cache(schedule, traits)
    kind_of_pool = PrefixPool if schedule.prefix_caching else BlockPool
    pool = pool or kind_of_pool(schedule.kv_blocks, schedule.block_size)
    kind = {
        "early_termination": traits.early_termination,
        "disaggregated": traits.disaggregated,
        "shares_in_step": shares_in_step(schedule),
        "lingering": lingering,
    }
    return Ledger(pool, order, **kind, encoder_decoder=encoder_decoder, admission=schedule.admission)
