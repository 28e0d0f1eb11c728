"""Iteration profile: the cost of a model's whole iterations, by tensor-parallel degree and share of the devices.

Measurements of models that share devices come in this form. It is coarser than a `Profile`'s layers, but it has the
share of each device's multiprocessors that an iteration may use.
"""

import functools
from dataclasses import dataclass, field

from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.profile import Table


@dataclass(frozen=True)
class IterationTables(Spec):
    """Seconds of iterations at one tensor-parallel degree and share."""

    tp: int
    share: float
    """Share of every device's multiprocessors, from above 0 to 1."""
    prefill: Table
    """Seconds by batch and length of its prompts."""
    decode: Table
    """Seconds by batch and mean context."""

    def __post_init__(self) -> None:
        if self.tp < 1 or not 0 < self.share <= 1:
            raise InputError(
                f"Iterations were measured on {self.tp} devices and a share of {self.share:g}: the degree must be "
                "at least 1, and the share above 0 and at most 1."
            )
        if not len(self.prefill.axes) == len(self.decode.axes) == 2:
            raise InputError(f"The iterations on {self.tp} devices need tables by batch and length.")


@dataclass(frozen=True)
class IterationProfile(Spec):
    """Iterations of one model on one kind of device."""

    version: int
    model: str
    device: str
    tables: tuple[IterationTables, ...]
    provenance: dict[str, object] = field(default_factory=dict)

    VERSION = 1

    def __post_init__(self) -> None:
        if self.version != IterationProfile.VERSION:
            raise InputError(
                f"This iteration profile has version {self.version}, but this version of exegpt reads version "
                f"{IterationProfile.VERSION}: import it again."
            )
        if not self.tables:
            raise InputError(f"The iteration profile of {self.model} has no table.")

    @functools.cached_property
    def degrees(self) -> tuple[int, ...]:
        """Return the measured tensor-parallel degrees."""
        return tuple(sorted({tables.tp for tables in self.tables}))

    def of(self, tp: int) -> tuple[IterationTables, ...]:
        """Return one degree's tables by rising share; InputError for a degree without tables."""
        found = sorted((tables for tables in self.tables if tables.tp == tp), key=lambda tables: tables.share)
        if not found:
            degrees = ", ".join(map(str, self.degrees))
            raise InputError(f"No iteration of {self.model} was measured on {tp} devices: use one of {degrees}.")
        return tuple(found)
