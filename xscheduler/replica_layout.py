"""Layouts of a replica on the devices of one kind, and the question of how many sustain a rate."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xcore.specs.cluster import ClusterSpec
from xcore.specs.schedule import Schedule
from xcore.specs.speculation import Speculation
from xcore.specs.workload import Workload
from xscheduler.allocation import most_stages
from xscheduler.drafts import Drafts
from xscheduler.goodput import RateBounds
from xscheduler.rate_sample import Arrivals
from xscheduler.setting_search import SearchOptions
from xscheduler.settings import Setting

NODE = 8
"""Most devices of a node."""
PART = (1, 2, 4, 8)
"""Devices of a replica within a node, and its tensor-parallel degrees."""
NODES = (2, 4)
"""Nodes of a replica that no single node holds."""


@dataclass(frozen=True, eq=False)
class ReplicaLayout:
    """One way to place a replica on devices of a kind, or the replicas that share experts (attention DP).

    Where replicas of a layout are counted, such a group counts as one.
    """

    setting: Setting
    """The model, with its experts as they are divided, and a node of this kind."""
    tp: int
    pp: int

    @property
    def devices(self) -> int:
        """The number of devices of a replica, or of a group that shares experts."""
        return self.tp * self.pp * self.shared

    @property
    def shared(self) -> int:
        """The number of replicas that share experts; 1: they share none."""
        return self.setting.model.attention_dp

    @property
    def kind(self) -> str:
        """The device kind."""
        return self.setting.cluster.device.kind

    @property
    def expert_parallel(self) -> bool:
        """Whether each device has whole experts."""
        return self.setting.model.expert_parallel(self.tp, self.setting.profile.dtype)

    def drafting(self, speculation: Speculation | None) -> "ReplicaLayout":
        """Return the layout whose decode iterations draft tokens."""
        return replace(self, setting=replace(self.setting, speculation=speculation))

    @property
    def drafted(self) -> int:
        """The number of draft tokens."""
        return self.setting.speculation.drafted if self.setting.speculation else 0

    @property
    def name(self) -> str:
        """The layout as text: `TP2`, `PP2×TP4`, `TP8, EP`."""
        stages = f"PP{self.pp}×" if self.pp > 1 else ""
        experts = f", attention DP{self.shared}" if self.shared > 1 else ", EP" if self.expert_parallel else ""
        return f"{stages}TP{self.tp}{experts}"

    def fixed(self, replicas: int) -> dict[str, int]:
        """Return the control variables that keep a search to this many replicas of this layout."""
        grouped = {"tp_gpus": self.devices} if self.tp > 1 else {}
        return {"tp_degree": self.tp, **grouped, "replicas": replicas * self.shared}

    def cluster(self, replicas: int) -> ClusterSpec:
        """Return the cluster of these replicas: a part of a node, or equal nodes without idle devices."""
        nodes, per_node = self._nodes(replicas)
        name = f"{f'{nodes}x' if nodes > 1 else ''}{per_node}x{self.kind}"
        return replace(self.setting.cluster, name=name, nodes=nodes, devices_per_node=per_node)

    def _nodes(self, replicas: int) -> tuple[int, int]:
        devices = self.devices * replicas
        if devices <= NODE:
            return 1, devices
        per_node = self.devices
        while per_node < NODE and devices % (2 * per_node) == 0:
            per_node *= 2
        per_node = min(per_node, NODE)
        return devices // per_node, per_node


@dataclass(frozen=True)
class DevicesNeeded:
    """The fewest replicas of a layout that sustain the rate, and the best schedule on them."""

    layout: ReplicaLayout
    replicas: int
    schedule: Schedule
    goodput_seq_s: float
    """About the rate that they sustain, at least the asked one."""
    price_hour: float | None

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.replicas * self.layout.devices

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster of the replicas."""
        return self.layout.cluster(self.replicas)


@dataclass(frozen=True)
class RateQuestion:
    """A rate to sustain within bounds, and the search for each layout."""

    rate_seq_s: float
    bounds: RateBounds
    search: SearchOptions
    arrivals: Arrivals
    prefix_caching: bool = False
    prices: Mapping[str, float] | None = None
    """Price of a device-hour of each kind; None: the number of devices counts."""
    drafts: Drafts | None = None
    """The numbers of draft tokens to try; None: those of the layouts' settings."""

    def computed(self, layout: ReplicaLayout) -> Workload:
        """Return the workload of a layout's replicas, without the tokens that an unlimited prefix cache has."""
        workload = layout.setting.workload
        return self.arrivals.computed(workload) if self.prefix_caching else workload

    def price(self, layout: ReplicaLayout, replicas: int) -> float | None:
        """Return the price per hour of these replicas; None without prices."""
        return None if self.prices is None else self.prices[layout.kind] * layout.devices * replicas

    def order(self, layout: ReplicaLayout, replicas: int) -> tuple[float, ...]:
        """Return the sort key: the price, the devices, the memory bandwidth of one, then simple layouts first."""
        devices = layout.devices * replicas
        bandwidth = layout.setting.cluster.device.bandwidth_bytes_s
        price = self.price(layout, replicas)
        return (
            devices if price is None else price,
            devices,
            bandwidth,
            layout.devices,
            layout.pp,
            layout.expert_parallel,
            layout.shared,
        )


def replica_layouts(setting: Setting, fixed: dict[str, int]) -> list[ReplicaLayout]:
    """Return the layouts of a replica in a node of the setting's kind, or on several if one node can't hold it."""
    degrees = [tables.tp for tables in setting.profile.degrees if tables.tp in PART]
    degrees = [tp for tp in degrees if fixed.get("tp_degree") in (None, tp)]
    pairs = [(tp, devices // tp) for devices in PART for tp in degrees if devices % tp == 0]
    stages = 1 if setting.model.attention_dp > 1 else most_stages(setting.model)
    return [ReplicaLayout(setting, tp, pp) for tp, pp in pairs if pp <= stages]


def larger_layouts(setting: Setting, fixed: dict[str, int]) -> list[ReplicaLayout]:
    """Return the layouts of a replica on several whole nodes, each of one tensor-parallel group."""
    if fixed.get("tp_degree") not in (None, NODE) or NODE not in [tables.tp for tables in setting.profile.degrees]:
        return []
    return [ReplicaLayout(setting, NODE, nodes) for nodes in NODES if nodes <= most_stages(setting.model)]


def least(rate: float, each: float) -> int:
    """Return the fewest replicas that sustain a rate if each sustains `each`."""
    return max(1, math.ceil(rate / each - 1e-9))
