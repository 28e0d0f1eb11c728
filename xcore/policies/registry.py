"""The registry of policies: the built-in ones, those of installed packages, and those of plug-in files."""

from collections.abc import Iterator, MutableMapping
from importlib.metadata import EntryPoint, entry_points

from xcore.errors import InputError
from xcore.policies import chunked, hybrid, orca, rra, static, waa
from xcore.policies.control import Control
from xcore.policies.traits import Traits

GROUP = "exegpt.policies"
"""Entry points of this group name the traits of a package's policy."""


class Registry(MutableMapping[str, Traits]):
    """Traits by the policy's name. Installed packages are read if a name isn't built in, or if all are requested."""

    def __init__(self, built_in: tuple[Traits, ...]) -> None:
        self._traits = {traits.name: traits for traits in built_in}
        self._complete = False

    def __getitem__(self, name: str) -> Traits:
        return self._traits[name] if name in self._traits else self._all()[name]

    def __setitem__(self, name: str, traits: Traits) -> None:
        self._traits[name] = traits

    def __delitem__(self, name: str) -> None:
        del self._traits[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def register(self, traits: Traits) -> None:
        """Register a policy for schedules.

        Raises:
            InputError: The name is taken or invalid, or the control record has no batch.
        """
        name = traits.name
        if name in self._traits:
            raise InputError(f"There is already a policy '{name}': choose another name.")
        if not name or name != name.lower() or set(name) & set(", \t\n"):
            raise InputError(f"A policy can't have the name {name!r}: use small letters, digits and hyphens.")
        if not (isinstance(traits.control, type) and issubclass(traits.control, Control)):
            raise InputError(f"The control record of policy '{name}' is not a class derived from Control.")
        if not (traits.name_of("residents") or traits.name_of("prompts")):
            raise InputError(
                f"Policy '{name}' limits neither resident sequences nor prompts: annotate a variable of its dataclass "
                f"{traits.control.__name__} as Residents or Prompts."
            )
        records = {known.control.__name__: known for known in self._traits.values() if known.control != traits.control}
        if same := records.get(traits.control.__name__):  # messages between processes name it
            raise InputError(
                f"The control record of policy '{name}' is called {traits.control.__name__}, like the record of "
                f"policy '{same.name}': choose another name."
            )
        self._traits[name] = traits

    def _all(self) -> dict[str, Traits]:
        if not self._complete:
            self._complete = True
            for entry in entry_points(group=GROUP):
                self.register(_installed(entry))
        return self._traits


def _installed(entry: EntryPoint) -> Traits:
    """Load a package's traits; InputError if the package has none."""
    package = entry.dist.name if entry.dist else entry.module
    try:
        traits: object = entry.load()
    except Exception as error:  # whatever the package's code raises
        raise InputError(
            f"The policy '{entry.name}' of package '{package}' can't be loaded ({error_text(error)}): correct the "
            "package, or uninstall it."
        ) from error
    if not isinstance(traits, Traits):
        raise InputError(
            f"'{entry.value}' of package '{package}' is of type {type(traits).__name__}, but it must be a Traits."
        )
    return traits


def error_text(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


TRAITS = Registry(
    (static.TRAITS, hybrid.TRAITS, orca.TRAITS, chunked.TRAITS, rra.TRAITS, waa.WAA_C, waa.WAA_M),
)
"""The traits of every policy by its name."""

register = TRAITS.register
"""Registers a policy for schedules."""
