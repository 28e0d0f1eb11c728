"""Traits: what everyone but a policy's own file needs to know of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, Protocol

from xcore.batching import Ledger, Step
from xcore.policies.adjustment import Adjustment
from xcore.specs.engine import OWN_ENGINE
from xcore.specs.schedule import Schedule, StagePhase

Kind = Literal["prompts", "residents", "tokens", "period", "micro-batches", "encode-micro-batches", "target"]
"""What a control variable sets: the most prompts encoded in one iteration, resident sequences, or tokens computed in
one iteration; the decoding iterations between two encoding phases; the micro-batches of decoding, and of encoding, that
may be left out. A target (B_D) follows from the others: schedules have it, searches don't set it.
"""


class Policy(Protocol):
    """Decides the next iteration."""

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """The next iteration at time `now` (seconds) on the stages of a phase, which are `both` unless the policy is
        disaggregated. None while nothing can run there before another request or encoded batch arrives, or blocks are
        freed.
        """


@dataclass(frozen=True, kw_only=True)
class Traits:
    """One policy's."""

    name: str
    what: str
    """In a line of `exegpt list policies`."""
    variables: Mapping[str, Kind]
    """Its control variables by their names in a Schedule."""
    make: Callable[[Schedule, Adjustment | None], Policy]
    """The policy with a schedule's variables, and with an adjustment where it has a target."""
    engines: tuple[str, ...] = (OWN_ENGINE,)
    """The presets (`xcore/specs/engine.py`) of the engines that run it: its predictions are of one of them."""
    compiled: int | None = None
    """Its number in xsimulator/replay/event_loop.c; None: it isn't compiled, and can't be searched at a rate."""
    disaggregated: bool = False
    """Whether encoding and decoding have stages of their own: two devices at least."""
    early_termination: bool = True
    """Whether finished sequences leave at once; else batches are static, and leave together."""
    mixed: bool = False
    """Whether one iteration encodes and decodes."""
    grows: bool = False
    """Whether it asks for blocks as sequences get longer (`Ledger.grow`), so that admission may be *grow*."""
    caches_prefixes: bool = False
    """Whether it prefills what the cache lacks of a prompt (`Sequence.to_prefill`), so that prefixes may be cached."""
    splits_prompts: bool = False
    """Whether a prompt may be encoded in several iterations, which an encoder's can't."""
    complexity: float = inf
    """The lowest wins where several policies are as good: what today's engines do, then one pipeline, then two, then
    batches."""
    mark: str = "?"
    """A letter on a terminal's plot."""
    colour: str = "#8a8f98"

    @property
    def required(self) -> tuple[str, ...]:
        """The variables that a schedule must have."""
        return tuple(name for name, kind in self.variables.items() if kind != "encode-micro-batches")

    @property
    def searched(self) -> tuple[str, ...]:
        """The variables that a search sets."""
        return tuple(name for name, kind in self.variables.items() if kind != "target")

    @property
    def adjustable(self) -> bool:
        """Whether it has a target, which dynamic adjustment keeps near."""
        return "target" in self.variables.values()

    def value(self, schedule: Schedule, kind: Kind) -> int | None:
        """A schedule's variable of this kind; None where the policy has none."""
        found: list[Any] = [getattr(schedule, name) for name, own in self.variables.items() if own == kind]
        return found[0] if found else None
