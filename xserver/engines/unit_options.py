"""The options of an engine process: its models, its arguments and its documents."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from xcore.errors import InputError
from xcore.spec import Spec
from xserver.text.message_formats import MessageFormats

if TYPE_CHECKING:
    from xserver.http.frontend import JointAdmissions


@dataclass(frozen=True)
class UnitModel:
    """A model of an engine process."""

    directory: Path
    name: str | None = None
    """The name by which requests select the model; None: its directory's name."""
    formats: MessageFormats = field(default_factory=MessageFormats)
    place: int = 0
    """Index among all models; the model's engine connects to the socket `engine-PLACE`."""


@dataclass(frozen=True)
class NodePlace:
    """Where the launcher of another node runs an engine."""

    node: int
    devices: tuple[int, ...]
    """As numbered on the node; a rank for each."""
    in_use: int
    """Devices of the node that the plan uses."""
    unit: int = 0
    """The place of the engine's models in `Plan.units`."""


@dataclass(frozen=True)
class EngineUnitOptions:
    """An engine process of one model, or of several that share devices."""

    models: tuple[UnitModel, ...]
    arguments: tuple[str, ...]
    """Arguments of `exegpt engine`, without its socket and without those in `documents`.

    For a launcher, they are also without the model, the unit and a share of the threads, which the launcher adds.
    """
    documents: Mapping[str, Spec] = field(default_factory=dict)
    """The documents that the engine reads from files, by the option that names the file."""
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of the engine."""
    follows: tuple[object, ...] = ()
    """Identifies what its models follow: a unit of another plan with the same value needs no other engine."""
    engine_socket: Path | None = None
    """The socket for ranks that a launcher has started; None: this server starts the ranks."""
    at: NodePlace | None = None
    """None: this process starts the engine."""
    admissions: "Callable[[], JointAdmissions] | None" = None
    """Create the joint admission of models that share devices; None: they have no bounds, or can't keep them."""


PROMISES = "--promises"
"""The flag of an engine of models that share devices whose server keeps their bounds."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(devices: Sequence[int]) -> dict[str, str]:
    """Return the variable that restricts a process to these GPUs, as numbered for this process.

    Raises:
        InputError: This process sees fewer GPUs.
    """
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        return {_VISIBLE: ",".join(map(str, devices))}
    seen = [name.strip() for name in visible.split(",") if name.strip()]
    if max(devices) >= len(seen):
        raise InputError(
            f"The plan uses device {max(devices)}, but {_VISIBLE}={visible} shows only {len(seen)}: show more devices."
        )
    return {_VISIBLE: ",".join(seen[device] for device in devices)}
