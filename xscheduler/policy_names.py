"""The policies that a search is asked for by name."""

from xcore.choices import check_choice


def policy_names(text: str | None) -> tuple[str, ...]:
    """The policies in a comma-separated list; all that can be searched where there is none."""
    from xscheduler.policy_spaces import POLICIES

    if text is None:
        return POLICIES
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    for name in names:
        check_choice(name, POLICIES, "Policy")
    return names
