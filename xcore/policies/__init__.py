"""Policies: each file decides one policy's next iteration from a ledger.

The event simulator and the runner both follow these decisions. Each file also has the policy's control variables and
its traits, which all other code reads.
"""

from xcore.errors import InputError
from xcore.policies.control import Control, Policy
from xcore.policies.registry import TRAITS, register
from xcore.policies.traits import Traits

__all__ = ["NOT_DEPLOYED", "TRAITS", "Policy", "Traits"]
__all__ += ["control_variables", "record_named", "register", "runs", "traits_of"]

NOT_DEPLOYED = ("paper", "none")
"""Engine presets that can't be deployed: all policies are predicted with the same one."""


def runs(engine: str, policy: str) -> bool:
    """Return whether an engine, by its preset's name, runs a policy."""
    return engine in NOT_DEPLOYED or engine in TRAITS[policy].engines


def traits_of(policy: str) -> Traits:
    """Return a policy's traits; InputError for an unknown one."""
    if policy not in TRAITS:
        known = ", ".join(TRAITS)
        raise InputError(f"There is no policy '{policy}': use one of {known}, or pass the policy's file with --plugin.")
    return TRAITS[policy]


def record_named(name: str) -> type[Control]:
    """Return a policy's control record by the name of its class; KeyError for an unknown one."""
    return {traits.control.__name__: traits.control for traits in TRAITS.values()}[name]


def control_variables() -> tuple[str, ...]:
    """Return the names of the variables that searches of any policy set."""
    return tuple(dict.fromkeys(name for traits in TRAITS.values() for name in traits.searched))
