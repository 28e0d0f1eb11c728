"""The compiled parts of exegpt, which an installation without a C compiler lacks: Python versions replace them."""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

EVENT_LOOP = "xsimulator.replay.event_loop"
PARTS = ("xcore.interpolation", "xsimulator.cost.recurrences", EVENT_LOOP, "xmulti.stages.batching_run")
_ROOT = Path(__file__).parent.parent


def is_there(part: str) -> bool:
    """Return whether a part was compiled when exegpt was installed."""
    path = _ROOT.joinpath(*part.split("."))
    return any(path.with_name(path.name + suffix).is_file() for suffix in EXTENSION_SUFFIXES)


def all_there() -> bool:
    """Return whether all parts were compiled."""
    return all(map(is_there, PARTS))
