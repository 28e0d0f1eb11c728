"""What an engine process is: its models, and with what it is started."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xcore.noun import Noun


@dataclass(frozen=True)
class UnitModel:
    """A model of an engine process."""

    directory: Path
    name: str | None = None
    """By which requests ask for it; None: its directory's."""
    chat_template: Path | None = None
    """A file to use in place of the model's own."""
    place: int = 0
    """Among all models; its engine connects to the socket `engine-PLACE`."""


@dataclass(frozen=True)
class UnitOptions:
    """An engine process of one model, or of several that share devices."""

    models: tuple[UnitModel, ...]
    arguments: tuple[str, ...]
    """Of `exegpt engine`, without its socket and what is in `documents`."""
    documents: Mapping[str, Noun] = field(default_factory=dict)
    """What the engine reads from a file, by the option that names the file."""
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the engine beside this process's."""
    follows: tuple[object, ...] = ()
    """What its models follow: a unit of another plan that follows the same needs no other engine."""
    engine_socket: Path | None = None
    """Where ranks connect that a launcher has started; None: they are started here."""
