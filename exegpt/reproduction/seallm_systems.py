"""SeaLLM and its baselines: their placements of services, and how their engines run them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from exegpt.reproduction.seallm_workload import (
    NODE,
    PREFILL_TOKENS,
    SLO,
    SeaService,
    ServiceArrays,
    cluster_of,
    kv_block,
    longest,
    on_devices,
)
from xcore.arrays import Array
from xcore.batching import BlockPool, Order
from xcore.batching.kv_pool import KVPool
from xcore.batching.shared_pool import MergedBlocks, MergedPool, QuotaPool, Store, least_memory
from xcore.orders import fcfs
from xcore.orders.doubling_budget import DoublingBudget
from xcore.orders.mlfq import SkipJoinMLFQ
from xcore.orders.product import Product
from xcore.policies.one_phase import OnePhasePolicy
from xcore.policies.priority_sharing import PrioritySharing
from xcore.policies.sharing import SpatialSharing, TimeSharing
from xcore.specs.schedule import BLOCK_SIZE
from xmulti.sharing.cluster_replay import ClusterReplay, ServiceRequests, SharedEngine, replay_cluster
from xmulti.sharing.iteration_cost import sharing_overhead
from xmulti.sharing.placement import Mesh, Placer, Popular
from xmulti.sharing.replay import ModelLoad
from xmulti.stages.two_stage import ALPHA, Placed, Service, ServiceGroup, ServiceOutcome, place_in_stages

OURS = "SeaLLM"
BASELINES = ("vLLM", "AlpaServe", "MuxServe")


@dataclass(frozen=True)
class Rule:
    """How engines that share by priority run their services."""

    order: Callable[[], Order]
    prompts_first: bool = True
    by_attainment: bool = False
    """Whether services are placed by their share of requests in time alone, onto the groups with the least load."""


RULES = {
    "AlpaServe": Rule(lambda: fcfs, by_attainment=True),
    OURS: Rule(lambda: DoublingBudget(executed=True)),
    "SeaLLM, by the letter": Rule(lambda: DoublingBudget(executed=True), prompts_first=False),
    "SeaLLM-F": Rule(lambda: fcfs),
    "SeaLLM-M": Rule(lambda: SkipJoinMLFQ(executed=True), prompts_first=False),
    "SeaLLM, true lengths": Rule(Product),
}
"""The rule of each system.

The first two have separate placements, the others use SeaLLM's. AlpaServe's is its fast heuristic: the service with
the most late requests goes to the group with the lowest utilization, and the placement with the most requests in time
is the best. Utilization is the sum of rate times L̂. The literal Algorithm 2 lets prompts wait for running
sequences of their own service. MLFQ is FastServe's, which sorts prompts and running sequences by one key.
"""


@dataclass(frozen=True, eq=False)
class History:
    """The input of a search for placements: services, and their past requests."""

    services: tuple[SeaService, ...]
    asked: Mapping[str, ServiceArrays]
    nodes: int
    rate_seq_s: float

    @cached_property
    def by_name(self) -> dict[str, SeaService]:
        """Services by name."""
        return {service.name: service for service in self.services}


def kv_bytes(size: int, services: Sequence[SeaService]) -> float:
    """Return the memory of `size` devices for the services' keys and values; negative if their weights don't fit."""
    memories = [on.memory for service in services if (on := on_devices(service.llm, size))]
    if len(memories) < len(services):
        return -1.0
    taken = sum(memory.weights for memory in memories) + max(memory.workspace + memory.held for memory in memories)
    return size * (memories[0].usable - taken)


def have_room(size: int, services: Sequence[SeaService]) -> bool:
    """Return whether services can share `size` devices, with merged blocks for the longest sequence of each at once."""
    models = [service.model for service in services]
    return kv_bytes(size, services) >= least_memory([*map(kv_block, models)], [*map(longest, models)])


def merged_engine(group: ServiceGroup, by_name: Mapping[str, SeaService], rule: Rule) -> SharedEngine:
    """Return an engine for services that share by priority over merged blocks."""
    services, size = [by_name[name] for name in group.services], len(group.devices)
    blocks = [kv_block(service.model) for service in services]
    merged = MergedBlocks.within(kv_bytes(size, services), blocks)
    order = rule.order()
    loads = [
        _load(service, size, MergedPool(merged, bytes, BLOCK_SIZE, pieces), order)
        for service, (bytes, pieces) in zip(services, blocks, strict=True)
    ]
    return SharedEngine(group.devices, tuple(loads), PrioritySharing(rule.prompts_first), _overhead(services))


def merged_engines(groups: Sequence[ServiceGroup], by_name: Mapping[str, SeaService], rule: Rule) -> list[SharedEngine]:
    """Return the engines of all groups that have services."""
    return [merged_engine(group, by_name, rule) for group in groups if group.services]


def _overhead(services: Sequence[SeaService]) -> float:
    return sharing_overhead([kv_block(service.model)[0] for service in services])


def _load(service: SeaService, size: int, pool: KVPool, order: Order = fcfs, share: float = 1.0) -> ModelLoad:
    on = on_devices(service.llm, size)
    assert on, "it has room"
    return ModelLoad(service.name, on.cost, (), pool, OnePhasePolicy(256, PREFILL_TOKENS, decode_share=share), order)


def dedicated_engines(services: Sequence[SeaService], nodes: int) -> list[SharedEngine] | None:
    """Return engines with each service on dedicated devices; None if they don't fit.

    Prefill comes first, by arrival, as in vLLM.
    """
    engines, first, sizes = [], 0, even_split(services, nodes)
    if not sizes:
        return None
    for service in sorted(services, key=lambda service: (-sizes[service.name], service.name)):
        size = sizes[service.name]  # powers of two, the largest first: none crosses a node
        pool = BlockPool(int(kv_bytes(size, [service]) // kv_block(service.model)[0]), BLOCK_SIZE)
        engines.append(
            SharedEngine(tuple(range(first, first + size)), (_load(service, size, pool),), TimeSharing(in_order=False))
        )
        first += size
    return engines


def even_split(services: Sequence[SeaService], nodes: int) -> dict[str, int]:
    """Split the devices evenly, in powers of two; empty if the services don't fit.

    Each service has at least the devices it needs. Remaining devices go to the services with the fewest devices, larger
    LLMs first.
    """
    sizes = {service.name: service.least for service in services}
    left = nodes * NODE - sum(sizes.values())
    larger = sorted(services, key=lambda service: -service.model.parameters)
    while (least := min(sizes.values())) < NODE and 0 < least <= left:
        for name in [service.name for service in larger if sizes[service.name] == least]:
            if least <= left:
                left, sizes[name] = left - least, 2 * least
    return sizes if left >= 0 else {}


class Scoring:
    """Simulates placements.

    A service's replicas take its requests in turn. So the outcome of a group depends only on its own services, and each
    group is simulated once.
    """

    def __init__(self, history: History, rule: Rule):
        self._history, self._rule = history, rule
        self._known: dict[tuple[object, ...], dict[str, Array]] = {}

    def __call__(self, groups: tuple[ServiceGroup, ...]) -> dict[str, ServiceOutcome]:
        """Return the outcomes of the services that have groups."""
        hosts: dict[str, list[ServiceGroup]] = {}
        for group in groups:
            for name in group.services:
                hosts.setdefault(name, []).append(group)
        sums = {name: np.zeros(3) for name in hosts}
        for group in groups:
            if group.services:
                parts = tuple((name, hosts[name].index(group), len(hosts[name])) for name in group.services)
                for name, counts in self._of(len(group.devices), parts).items():
                    sums[name] += counts
        return {
            name: ServiceOutcome(int(late), float(total / max(1, count)), int(count))
            for name, (late, total, count) in sums.items()
        }

    def _of(self, size: int, parts: tuple[tuple[str, int, int], ...]) -> dict[str, Array]:
        """Return for each service, [3]: late requests, the sum of normalised latencies, and requests."""
        key = size, parts
        if key not in self._known:
            asked = {name: self._history.asked[name].only(slice(turn, None, of)) for name, turn, of in parts}
            group = ServiceGroup(tuple(range(size)), tuple(name for name, _, _ in parts))
            replay = replay_of(asked, [merged_engine(group, self._history.by_name, self._rule)])
            self._known[key] = {name: _counted(own, replay) for name, own in asked.items()}
        return self._known[key]


def _counted(asked: ServiceArrays, replay: ClusterReplay) -> Array:
    latency = np.array([served.finish_s - served.arrival_s for served in replay.served[asked.service.name]])
    late = np.sum(latency > SLO * asked.alone_s)
    return np.array([late, latency.sum() / asked.service.mean_s, len(latency)])


def two_stage(history: History, rule: Rule) -> Placed | None:
    """Return SeaLLM's placement under a rule, or AlpaServe's; None if no placement has all services."""
    services = [
        Service(
            s.name,
            history.rate_seq_s * s.popularity * (s.mean_s if rule.by_attainment else 1.0),
            len(history.asked[s.name].inputs),
        )
        for s in history.services
    ]
    known: dict[tuple[int, tuple[str, ...]], bool] = {}

    def fits(size: int, names: tuple[str, ...]) -> bool:
        key = size, tuple(sorted(history.by_name[name].llm for name in names))
        if key not in known:
            known[key] = have_room(size, [history.by_name[name] for name in names])
        return known[key]

    alpha = 0.0 if rule.by_attainment else ALPHA
    return place_in_stages(services, history.nodes, NODE, fits, Scoring(history, rule), alpha=alpha)


def mux_engines(history: History) -> list[SharedEngine] | None:
    """Return the engines of MuxServe's placement; None without one.

    An engine is a mesh with shares of the multiprocessors and a cache with quotas.
    """
    cluster = cluster_of(history.nodes)
    memories = [on.memory for s in history.services if (on := on_devices(s.llm, s.least))]
    other = max(memory.workspace + memory.held for memory in memories)
    placer = Placer(cluster.device.memory_bytes * cluster.memory_fraction, other)
    popular = [_popular(service, history.rate_seq_s * service.popularity) for service in history.services]
    placement = placer.place(popular, history.nodes, NODE, lambda done, of: None)
    if placement is None:
        return None
    return [_mux_engine(mesh, placer.kv_bytes(mesh), history.by_name) for mesh in placement.meshes if mesh.occupants]


def _popular(service: SeaService, rate_seq_s: float) -> Popular:
    on = on_devices(service.llm, service.least)
    assert on
    return Popular(
        service.name,
        rate_seq_s,
        float(service.inputs.mean()),
        float(service.outputs.mean()),
        rate_seq_s * service.model.parameters,
        lambda devices: found.cost if (found := on_devices(service.llm, devices)) else None,
        on.memory.weights * service.least,
        kv_block(service.model)[0] / BLOCK_SIZE,
        BLOCK_SIZE * longest(service.model),
    )


def _mux_engine(mesh: Mesh, memory: float, by_name: Mapping[str, SeaService]) -> SharedEngine:
    services = [by_name[occupant.popular.name] for occupant in mesh.occupants]
    parts = [service.model.layers * service.model.kv_heads for service in services]
    part_bytes = max(kv_block(service.model)[0] / part for service, part in zip(services, parts, strict=True))
    store = Store(int(memory / part_bytes))
    least = [part * longest(service.model) for service, part in zip(services, parts, strict=True)]
    wanted = [o.popular.rate_seq_s * o.popular.kv_token_bytes for o in mesh.occupants]
    loads = []
    for service, occupant, part, own, want in zip(services, mesh.occupants, parts, least, wanted, strict=True):
        quota = own + int((store.total - sum(least)) * want / sum(wanted))
        pool = QuotaPool(store, part, BLOCK_SIZE, quota)
        loads.append(_load(service, len(mesh.devices), pool, fcfs, occupant.decode_share))
    return SharedEngine(mesh.devices, tuple(loads), SpatialSharing(), _overhead(services))


@dataclass(frozen=True)
class Figures:
    """Measures over all requests."""

    requests: int
    normalised: float
    """L_N: the mean of latency over L̂."""
    waiting: float
    """The part of L_N before the first prefill begins."""
    first: float
    """The part of L_N from then to the first token; the rest is decoding."""
    in_time: float
    """Share of requests with a latency of at most SLO times their own time alone."""
    tail_s: float
    """99th percentile of latency."""
    ttft_s: float
    tpot_s: float
    busy: float
    """Share of the engines' time in which a job runs, until the last request is done."""
    preemptions: int
    services_late: int
    """Number of services with less than nine tenths of their requests in time."""
    in_time_at: tuple[float, ...]
    """Shares of requests within `SCALES` times the service's mean time alone."""
    groups: str
    """Engines by their numbers of devices, like `4 × 2, 24 × 1`."""


SCALES = (1.0, 2.0, 5.0, 10.0, 20.0)


def replay_of(asked: Mapping[str, ServiceArrays], engines: Sequence[SharedEngine]) -> ClusterReplay:
    """Replay all services' requests on these engines."""
    return replay_cluster(engines, {name: own.requests for name, own in asked.items()})


def alone_replay(
    asked: Mapping[str, ServiceArrays], groups: Sequence[ServiceGroup], history: History, rule: Rule
) -> ClusterReplay:
    """Replay each service's requests on its groups, as if the other services there had no requests."""
    served, busy_s, preemptions = {}, {"encode": 0.0, "decode": 0.0}, 0
    for name, own in asked.items():
        hosts = [group for group in groups if name in group.services]
        nobody = {beside: ServiceRequests(()) for group in hosts for beside in group.services}
        engines = merged_engines(hosts, history.by_name, rule)
        replay = replay_cluster(engines, nobody | {name: own.requests})
        served[name] = replay.served[name]
        busy_s = {phase: seconds + replay.busy_s[phase] for phase, seconds in busy_s.items()}
        preemptions += replay.preemptions
    return ClusterReplay(served, busy_s, preemptions, sum(bool(group.services) for group in groups))


def figures_of(asked: Mapping[str, ServiceArrays], replay: ClusterReplay, engines: Sequence[SharedEngine]) -> Figures:
    """Return the measures of a replay."""
    parts = [_columns(own, replay) for own in asked.values() if len(own.inputs)]
    arrival, start, first, finish, alone, mean, outputs = np.concatenate(parts, axis=1)
    latency, many = finish - arrival, outputs > 1
    late = sum(float(np.mean(p[3] - p[0] <= SLO * p[4])) < 0.9 for p in parts)
    sizes = [len(engine.devices) for engine in engines]
    return Figures(
        len(latency),
        float((latency / mean).mean()),
        float(((start - arrival) / mean).mean()),
        float(((first - start) / mean).mean()),
        float((latency <= SLO * alone).mean()),
        float(np.percentile(latency, 99)),
        float((first - arrival).mean()),
        float(((finish - first)[many] / (outputs[many] - 1)).mean()),
        sum(replay.busy_s.values()) / (replay.engines * float(finish.max())),
        replay.preemptions,
        late,
        tuple(float((latency <= scale * mean).mean()) for scale in SCALES),
        ", ".join(f"{sizes.count(size)} × {size}" for size in sorted(set(sizes), reverse=True)),
    )


def _columns(asked: ServiceArrays, replay: ClusterReplay) -> Array:
    """Return [7, requests]: arrival, start, first token and end in seconds, time alone, L̂, output tokens."""
    served = replay.served[asked.service.name]
    rows = [(s.arrival_s, s.start_s, s.first_token_s, s.finish_s, s.output_tokens) for s in served]
    times = np.array(rows, dtype=np.float64).T
    return np.vstack([times[:4], asked.alone_s, np.full(len(rows), asked.service.mean_s), times[4]])
