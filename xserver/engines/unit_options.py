"""The options of an engine process: its models, its arguments and its documents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xcore.spec import Spec
from xserver.text.message_formats import MessageFormats


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
class EngineUnitOptions:
    """An engine process of one model, or of several that share devices."""

    models: tuple[UnitModel, ...]
    arguments: tuple[str, ...]
    """Arguments of `exegpt engine`, without its socket and without those in `documents`."""
    documents: Mapping[str, Spec] = field(default_factory=dict)
    """The documents that the engine reads from files, by the option that names the file."""
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of the engine."""
    follows: tuple[object, ...] = ()
    """Identifies what its models follow: a unit of another plan with the same value needs no other engine."""
    engine_socket: Path | None = None
    """The socket for ranks that a launcher has started; None: this server starts the ranks."""
