"""PrefillDecode: replicas that only prefill beside replicas that only decode, as engines disaggregate them (xP yD)."""

from dataclasses import dataclass

from xcore.specs.schedule import Schedule


@dataclass(frozen=True)
class PrefillDecode:
    """Two deployments of one model: each prompt's keys and values go from a replica of the first to one of the second.

    Every replica is an engine of its own, with its own tensor parallelism.
    """

    prefill: Schedule
    """The schedule of the replicas that compute prompts; its `replicas` is x."""
    decode: Schedule
    """The schedule of the replicas that compute outputs; its `replicas` is y."""

    @property
    def devices(self) -> int:
        """The number of devices of all replicas."""
        return sum(side.replicas * side.stages[0].tp for side in (self.prefill, self.decode))

    def fits(self, nodes: int, devices_per_node: int) -> bool:
        """Return whether the replicas fit on such nodes, each of them within one."""
        free = [devices_per_node] * nodes
        sides = sorted((self.prefill, self.decode), key=lambda side: -side.stages[0].tp)
        for tp in (side.stages[0].tp for side in sides for _ in range(side.replicas)):
            node = next((place for place, left in enumerate(free) if left >= tp), None)
            if node is None:
                return False
            free[node] -= tp
        return True

    @property
    def name(self) -> str:
        """The layout as text: `2P×TP2 + 1D×TP4`."""
        p, d = self.prefill, self.decode
        return f"{p.replicas}P×TP{p.stages[0].tp} + {d.replicas}D×TP{d.stages[0].tp}"
