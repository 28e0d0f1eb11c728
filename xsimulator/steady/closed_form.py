"""A policy's steady state in closed form: what each of this folder's files of a policy enters into the registry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xcore.specs.schedule import BLOCK_SIZE
from xsimulator.steady.occupancy import RESERVED, Pool
from xsimulator.steady.outcome import Outcome
from xsimulator.steady.scenario import Scenario

Controls = Mapping[str, Any]
"""A policy's control variables by name, with `admission`, `kv_blocks` and `block_size` where they are known."""
Steady = Callable[[Controls], Outcome]
"""A policy's steady state in one scenario, by its control variables."""


@dataclass(frozen=True)
class ClosedForm:
    """The steady state of some policies."""

    policies: tuple[str, ...]
    steady: Callable[[Scenario], Steady]
    grows: bool = False
    """Whether it is known with admission *grow* too."""


def pool_of(controls: Controls) -> Pool:
    """Return a schedule's cache; of a point of a search, which is no schedule yet, what its residents need."""
    if controls.get("admission", "reserve") == "reserve":
        return RESERVED
    return Pool(True, blocks_of(controls))


def blocks_of(controls: Controls) -> int | None:
    """Return the KV blocks of `BLOCK_SIZE` tokens; None where they aren't known."""
    blocks = controls.get("kv_blocks")
    return blocks and blocks * controls.get("block_size", BLOCK_SIZE) // BLOCK_SIZE
