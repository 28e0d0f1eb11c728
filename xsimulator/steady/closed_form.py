"""A policy's steady state in closed form: the registry entry of each policy's file in this folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xcore.specs.schedule import BLOCK_SIZE
from xsimulator.steady.occupancy import RESERVED, Pool
from xsimulator.steady.outcome import Needs, Outcome
from xsimulator.steady.scenario import Scenario

Controls = Mapping[str, int]
"""The variables of a policy that are set, by name, with `kv_blocks`, `block_size`, and `grows` (admission *grow*)."""
Steady = Callable[[Controls], Outcome]
"""A policy's steady state in one scenario, as a function of its control variables."""


@dataclass(frozen=True)
class ClosedForm:
    """The steady state of some policies."""

    policies: tuple[str, ...]
    steady: Callable[[Scenario], Steady]
    grows: bool = False
    """Whether the closed form covers admission *grow* too."""
    needs: Callable[[Scenario, Controls], Needs | None] = lambda scenario, controls: None
    """Returns the needs of a point without computing its times; None if its times are necessary."""


def pool_of(controls: Controls) -> Pool:
    """Return a schedule's cache; for a search point without a cache, the blocks that its residents need."""
    return Pool(True, blocks_of(controls)) if controls.get("grows") else RESERVED


def blocks_of(controls: Controls) -> int | None:
    """Return the KV blocks of `BLOCK_SIZE` tokens; None if they are unknown."""
    blocks = controls.get("kv_blocks")
    return blocks and blocks * controls.get("block_size", BLOCK_SIZE) // BLOCK_SIZE
