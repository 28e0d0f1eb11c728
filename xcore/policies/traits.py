"""Traits: what all code outside a policy's own file needs to know of it."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from math import inf

from xcore.errors import InputError
from xcore.policies.control import Control, Kind, batch_name, kinds, name_of
from xcore.specs.engine_spec import OWN_ENGINE


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The traits of one policy."""

    name: str
    what: str
    """Description in `exegpt list policies`."""
    control: type[Control]
    """The record of its control variables, which builds the policy."""
    engines: tuple[str, ...] = (OWN_ENGINE,)
    """The presets (`xcore/specs/engine_spec.py`) of the engines that run it: its predictions are of one of them."""
    compiled: int | None = None
    """Its number in xsimulator/replay/event_loop.c; None: it isn't compiled, and can't be searched at a rate."""
    disaggregated: bool = False
    """Whether encoding and decoding have their own stages: at least two devices."""
    early_termination: bool = True
    """Whether finished sequences leave at once; else batches are static, and leave together."""
    mixed: bool = False
    """Whether one iteration encodes and decodes."""
    grows: bool = False
    """Whether it allocates blocks as sequences get longer (`Ledger.grow`), so that admission may be *grow*."""
    caches_prefixes: bool = False
    """Whether it prefills only a prompt's uncached part (`Sequence.to_prefill`), so that prefixes may be cached."""
    gives_way: bool = False
    """Whether it lets running sequences give way to waiting ones (`GivingWay.make_way`)."""
    splits_prompts: bool = False
    """Whether a prompt may be encoded in several iterations, which an encoder doesn't support."""
    complexity: float = inf
    """The lowest wins among equally good policies: today's engines, then one pipeline, then two, then batches."""
    mark: str = "?"
    """A letter on a terminal's plot."""
    colour: str = "#8a8f98"

    @property
    def searched(self) -> tuple[str, ...]:
        """Return the names of the variables that a search sets."""
        return tuple(name for name, kind in kinds(self.control).items() if kind not in (None, "target"))

    @property
    def adjustable(self) -> bool:
        """Return whether the policy has a target that dynamic adjustment can approach."""
        return self.name_of("target") is not None

    @property
    def batch_name(self) -> str:
        """Return the name of the variable that is the batch."""
        return batch_name(self.control)

    def name_of(self, kind: Kind) -> str | None:
        """Return the name of the variable of a kind; None if the policy has none."""
        return name_of(self.control, kind)

    def record(self, variables: Mapping[str, int | None], target: int = 1) -> Control:
        """Return the record of these variables; search points, which have no target, get this `target`.

        Raises InputError for a variable that the policy doesn't have, or that is missing.
        """
        given = {name: value for name, value in variables.items() if value is not None}
        if (name := self.name_of("target")) and name not in given:
            given[name] = target
        needed = [field.name for field in fields(self.control) if field.default is MISSING]
        missing = [name for name in needed if name not in given]
        unknown = [name for name in given if name not in kinds(self.control)]
        if missing or unknown:
            problem = f"needs {' and '.join(missing)}" if missing else f"can't have {' and '.join(unknown)}"
            raise InputError(f"A schedule of policy {self.name} {problem}: its variables are {', '.join(needed)}.")
        return self.control(**given)
