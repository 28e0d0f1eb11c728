"""Names of policies, as typed."""

from xcore.choices import check_choice


def policy_names(text: str | None) -> tuple[str, ...]:
    """Return the policies of a comma-separated list; all searchable policies for None."""
    from xscheduler.spaces import POLICIES

    if text is None:
        return POLICIES
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    for name in names:
        check_choice(name, POLICIES, "Policy")
    return names
