"""Checks of options that name one of several things: an unknown name is refused with the list of known ones."""

from dataclasses import replace
from typing import TypeVar

from xcore.batching.admission import ADMISSIONS, Admission
from xcore.errors import InputError
from xcore.policies import TRAITS
from xcore.policies.adjustment import USUAL_SHARE
from xcore.specs.bound import PERCENTILES, BoundMeaning
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xcore.traces.trace import form_of

Choice = TypeVar("Choice", bound=str)


def check_choice(value: str, allowed: tuple[Choice, ...], option: str) -> Choice:
    """Return the member of `allowed` that equals `value`; InputError if there is none."""
    for choice in allowed:
        if choice == value:
            return choice
    raise InputError(f"{option} '{value}' is not known: use one of {', '.join(allowed)}.")


def bound_meaning(name: str, percentile: float) -> BoundMeaning:
    """Return the bound's meaning from --bound and --percentile."""
    check_choice(name, ("requests", "p99-length", "p99-queries"), "--bound")
    if percentile not in PERCENTILES:
        known = ", ".join(f"{p:g}" for p in PERCENTILES)
        raise InputError(f"--percentile {percentile:g} is not known: use one of {known}.")
    return BoundMeaning("p99-length" if name == "p99-length" else "requests", percentile)


def check_columns(columns: str | None, *sources: str | None, scale: bool = False) -> None:
    """Raise InputError for --columns, or for lengths to `scale`, if none of `sources` is a trace."""
    if any(form_of(source or "") for source in sources):
        return
    if columns:
        raise InputError(f"--columns '{columns}' names columns of a trace, but there is no trace: leave --columns out.")
    if scale:
        raise InputError("--scale-to-context scales the lengths of a trace, but there is no trace: leave it out.")


def admission_rule(typed: str | None, policy: str | None) -> Admission:
    """Return the rule that --admission names; InputError if the policy doesn't have it."""
    if typed is None:
        return "reserve"
    rule = check_choice(typed, tuple(ADMISSIONS), "--admission")
    growing = [name for name, traits in TRAITS.items() if traits.grows]
    if ADMISSIONS[rule].grows and policy is not None and policy not in growing:
        raise InputError(
            f"--admission {rule} requires one of the policies {', '.join(growing)}, but the policy is {policy}: "
            "leave it out."
        )
    return rule


def with_adjustment(schedule: Schedule, share: float | None, never: bool) -> Schedule:
    """Return the schedule with --adjust and --no-adjust, by default with its own or the usual share.

    Raises InputError for both options, or for a share if the policy has no target.
    """
    if share is not None and never:
        raise InputError(f"--adjust {share:g} contradicts --no-adjust: leave one of them out.")
    if not schedule.traits.adjustable:
        if share is not None:
            adjustable = ", ".join(traits.name for traits in TRAITS.values() if traits.adjustable)
            raise InputError(
                f"--adjust {share:g} needs one of the policies {adjustable}, but the schedule has {schedule.policy}: "
                "leave it out."
            )
        return schedule
    own = USUAL_SHARE if schedule.adjust is None else schedule.adjust
    return replace(schedule, adjust=None if never else own if share is None else share)


def check_prefix_caching(policy: str | None, model: ModelSpec, option: str = "--prefix-caching") -> None:
    """Raise InputError for an option if the policy, or all policies, can't cache a model's prefixes."""
    caching = [name for name, traits in TRAITS.items() if traits.caches_prefixes]
    if model.encoder_layers:
        raise InputError(f"{option} requires a decoder-only model, but '{model.name}' has an encoder: leave it out.")
    if policy is not None and policy not in caching:
        raise InputError(
            f"{option} requires one of the policies {', '.join(caching)}, but the policy is {policy}: leave it out."
        )


def with_prefixes(policies: tuple[str, ...], typed: str | None, option: str = "--prefix-caching") -> tuple[str, ...]:
    """Return the policies that cache prefixes; InputError if the user chose a policy that doesn't."""
    caching = tuple(name for name in policies if TRAITS[name].caches_prefixes)
    lacking = [name for name in policies if name not in caching]
    if typed is not None and lacking:
        known = ", ".join(name for name, traits in TRAITS.items() if traits.caches_prefixes)
        raise InputError(
            f"{option} works with {known}, but --policy includes {', '.join(lacking)}: remove one of the two options."
        )
    return caching
