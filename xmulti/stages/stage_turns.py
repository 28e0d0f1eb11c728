"""The rule for which nodes of a planned application run, and on which GPUs, for any outputs (SamuLLM, section 4.3).

When a leading node ends, it is the next stage's turn. Nodes that are in both stages continue, and a node that no later
stage has keeps running. Then the next stage's other nodes are placed and, if GPUs remain, running nodes that later
stages have. No stage begins while an earlier one has nodes that are neither placed nor finished. A stage whose leading
node was finished before its turn is over as soon as its other nodes are placed. Simulated runs (`running_phase.py`) and
real ones follow the same rule.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from xmulti.sharing.gpu_choice import choose_gpus
from xmulti.stages.greedy_stages import Host, gpus
from xmulti.stages.stage_progress import Parallel, Placed


@dataclass(frozen=True)
class Turn:
    """The nodes that run from now on."""

    placed: dict[str, Parallel]
    devices: dict[str, tuple[int, ...]]
    stays: frozenset[str]
    """Nodes that continue unchanged on their GPUs.

    All other running nodes are stopped, and the rest of `placed` is loaded.
    """
    moved: int
    """Number of nodes that are reloaded only because others need their GPUs."""


class StageTurns:
    """A plan's stages during a run: `next` returns the nodes to run, `end` takes nodes without remaining calls.

    `sources` maps each node to the nodes that it reads; every node is after its sources. `load_s` is the loading
    time of a node.
    """

    def __init__(
        self,
        host: Host,
        stages: Sequence[Placed],
        sources: Mapping[str, Collection[str]],
        load_s: Callable[[str, Parallel], float],
    ):
        self._host, self._stages, self._at = host, stages, 0
        self._sources, self._load_s = sources, load_s
        self.unfinished = list(sources)
        """Nodes with remaining calls, each after its sources."""
        self.running: dict[str, Parallel] = {}
        self.devices: dict[str, tuple[int, ...]] = {}
        """Devices of the running nodes."""

    def next(self) -> Turn:
        """Return the nodes to run from now on; there must be unfinished nodes."""
        placed = self._placed()
        goes_on = {name: self.devices[name] for name, way in placed.items() if self.running.get(name) == way}
        reload_s = {name: self._load_s(name, placed[name]) for name in goes_on}
        self.devices = choose_gpus(placed, goes_on, reload_s, self._host)
        stays = frozenset(name for name, devices in goes_on.items() if self.devices[name] == devices)
        self.running = dict(placed)
        return Turn(dict(placed), dict(self.devices), stays, len(goes_on) - len(stays))

    def end(self, names: Collection[str]) -> None:
        """Record that these nodes have no remaining calls."""
        leading = [name for name in self.running if not any(source in self.running for source in self._sources[name])]
        self.unfinished = [name for name in self.unfinished if name not in names]
        self.running = {name: way for name, way in self.running.items() if name not in names}
        self.devices = {name: devices for name, devices in self.devices.items() if name not in names}
        if any(name in names for name in leading) and not self._pending(self.running):
            self._at += 1

    def _stage(self, at: int) -> dict[str, Parallel]:
        """Return the unfinished nodes of a planned stage."""
        stage = self._stages[at] if at < len(self._stages) else {}
        return {name: way for name, way in stage.items() if name in self.unfinished}

    def _pending(self, running: Mapping[str, Parallel]) -> bool:
        """Return whether the current stage has nodes that don't run as planned."""
        return any(running.get(name) != way for name, way in self._stage(self._at).items())

    def _placed(self) -> dict[str, Parallel]:
        placed = self._placed_beside(self.running)
        while self._is_over(placed):
            self._at += 1
            placed = self._placed_beside(placed)
        return placed

    def _is_over(self, placed: Mapping[str, Parallel]) -> bool:
        """Return whether the current stage would be over if its nodes had run as `placed`."""
        if self._at + 1 >= len(self._stages) or self._pending(placed):
            return False
        stage = self._stages[self._at]
        leading = [name for name in stage if not any(source in stage for source in self._sources[name])]
        return any(name not in self.unfinished for name in leading)

    def _placed_beside(self, running: Mapping[str, Parallel]) -> dict[str, Parallel]:
        """Return the nodes to run: the nodes of the next stage with unfinished nodes, and the running nodes."""
        while self._at < len(self._stages) and not self._stage(self._at):
            self._at += 1
        stage = self._stage(self._at)
        later = {name for at in range(self._at + 1, len(self._stages)) for name in self._stage(at)}
        placed = {name: way for name, way in running.items() if stage.get(name) == way}
        placed.update({name: way for name, way in running.items() if name not in stage and name not in later})
        for _ in range(2):  # second pass: with the GPUs of nodes that would only wait for sources that don't run
            for name in self.unfinished:  # the stage's others, sources first
                if name in stage and name not in placed:
                    self._add(placed, name, stage[name])
            for name in self.unfinished:  # then running nodes of later stages
                if name in self.running and name not in placed and (name in later or name in stage):
                    self._add(placed, name, self.running[name])
            placed = self._with_sources(placed)
        if not placed:
            raise AssertionError("the first stage with unfinished nodes fits on a host with nothing else on it")
        return placed

    def _with_sources(self, placed: dict[str, Parallel]) -> dict[str, Parallel]:
        """Return the nodes whose sources are all finished or run too."""
        kept: dict[str, Parallel] = {}
        for name in self.unfinished:
            if name in placed and self._can_run(name, kept):
                kept[name] = placed[name]
        return kept

    def _add(self, placed: dict[str, Parallel], name: str, way: Parallel) -> None:
        """Place a node if GPUs and its sources allow it."""
        if gpus(placed) + way.gpus <= self._host.devices and self._can_run(name, placed):
            placed[name] = way

    def _can_run(self, name: str, beside: Collection[str]) -> bool:
        """Return whether all sources of a node are finished, or are in `beside`."""
        return all(source not in self.unfinished or source in beside for source in self._sources[name])
