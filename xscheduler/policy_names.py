"""Parse names of policies as the user types them."""

from xcore.choices import check_choice


def policy_names(text: str | None) -> tuple[str, ...]:
    """Return the policies of a comma-separated list; None: all policies with their own spaces."""
    from xcore.policies import TRAITS
    from xscheduler.spaces import POLICIES

    if text is None:
        return POLICIES
    known = tuple(dict.fromkeys((*POLICIES, *(name for name, traits in TRAITS.items() if not traits.disaggregated))))
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    for name in names:
        check_choice(name, known, "Policy")
    return names
