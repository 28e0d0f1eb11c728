"""Policies: what to do next. Each file decides one policy's next iteration from a ledger, which the event simulator and
the runner both follow, and has its control variables and traits, which everyone else reads.
"""

from xcore.errors import InputError
from xcore.policies import chunked, hybrid, orca, rra, static, waa
from xcore.policies.control import Policy
from xcore.policies.traits import Traits

__all__ = ["NOT_DEPLOYED", "TRAITS", "Policy", "Traits", "control_variables", "register", "runs", "traits_of"]

TRAITS: dict[str, Traits] = {}
"""Every policy's by its name."""


def register(traits: Traits) -> None:
    """Let schedules name a policy; InputError for a name that is taken, or a record without a batch."""
    if traits.name in TRAITS:
        raise InputError(f"There is a policy '{traits.name}' already: give this one another name.")
    if not (traits.name_of("residents") or traits.name_of("prompts")):
        raise InputError(
            f"Policy '{traits.name}' limits neither resident sequences nor prompts: annotate a variable of its "
            f"{traits.control.__name__} as Residents or Prompts."
        )
    TRAITS[traits.name] = traits


for _traits in (static.TRAITS, hybrid.TRAITS, orca.TRAITS, chunked.TRAITS, rra.TRAITS, waa.WAA_C, waa.WAA_M):
    register(_traits)


NOT_DEPLOYED = ("paper", "none")
"""Presets of no engine that can be deployed: all policies are predicted with the same."""


def runs(engine: str, policy: str) -> bool:
    """Return whether an engine, by its preset's name, runs a policy."""
    return engine in NOT_DEPLOYED or engine in TRAITS[policy].engines


def traits_of(policy: str) -> Traits:
    """Return a policy's traits; InputError for an unknown one."""
    if policy not in TRAITS:
        raise InputError(f"There is no policy '{policy}': use one of {', '.join(TRAITS)}.")
    return TRAITS[policy]


def control_variables() -> tuple[str, ...]:
    """Return the names of the variables that searches of any policy set."""
    return tuple(dict.fromkeys(name for traits in TRAITS.values() for name in traits.searched))
