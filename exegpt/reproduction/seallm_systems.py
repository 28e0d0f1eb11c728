"""The systems that SeaLLM is compared with, and SeaLLM: where each puts services, and how its engines run them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exegpt.batching import BlockPool, Order
from exegpt.batching.kv_pool import KVPool
from exegpt.batching.shared_pool import MergedBlocks, MergedPool, QuotaPool, Store
from exegpt.builtin_models import builtin_model
from exegpt.errors import Infeasible
from exegpt.orders import fcfs
from exegpt.orders.doubling_budget import DoublingBudget
from exegpt.orders.mlfq import SkipJoinMLFQ
from exegpt.orders.product import Product
from exegpt.reproduction.seallm_workload import (
    NODE,
    PREFILL_TOKENS,
    SLO,
    Asked,
    SeaService,
    cluster_of,
    on_devices,
)
from exegpt.schedule import BLOCK_SIZE
from xscheduler.multimodel.placement import Mesh, Placer, Popular
from xscheduler.multimodel.two_stage import Group, Outcome, Placed, Service, place_in_stages
from xsimulator.cost.memory import RESERVE_BYTES
from xsimulator.multimodel.cluster import ClusterReplay, Engine, ServiceRequests, replay_cluster
from xsimulator.multimodel.merged import merged_blocks, sharing_overhead
from xsimulator.multimodel.priority import PrioritySharing
from xsimulator.multimodel.replay import Load
from xsimulator.multimodel.sharing import SpatialSharing, TimeSharing
from xsimulator.multimodel.tenant import Limits
from xsimulator.multimodel.unit import Sharing


@dataclass(frozen=True)
class Rule:
    """How an engine of priorities runs its services."""

    order: Callable[[], Order]
    prompts_first: bool = False


RULES = {
    "seallm": Rule(lambda: DoublingBudget(executed=True)),
    "fcfs": Rule(lambda: fcfs),
    "mlfq": Rule(lambda: SkipJoinMLFQ(executed=True)),
    "oracle": Rule(Product),
}
RULES |= {f"{name}, prompts first": replace(rule, prompts_first=True) for name, rule in RULES.items()}


def kv_bytes(size: int, services: Sequence[SeaService]) -> float:
    """Memory of so many devices for the services' keys and values; below 0 where their weights have no room."""
    found = [on_devices(service.llm, size) for service in services]
    if any(on is None for on in found):
        return -1.0
    memories = [on.memory for on in found if on]
    taken = sum(memory.weights for memory in memories) + max(memory.workspace for memory in memories) + RESERVE_BYTES
    return size * (memories[0].usable - taken)


def block_bytes(service: SeaService) -> int:
    """Of a block of its keys and values."""
    return block_bytes_of(service.llm)


def block_bytes_of(llm: str) -> int:
    """Of a block of an LLM's."""
    model = builtin_model(llm)
    return int(BLOCK_SIZE * model.layers * model.kv_bytes(1, "fp16"))


def _longest(service: SeaService) -> int:
    """Blocks of a sequence that fills its context, and one more."""
    return service.model.context // BLOCK_SIZE + 1


def merged(size: int, services: Sequence[SeaService]) -> MergedBlocks | None:
    """The merged blocks of services that share so many devices; None where one couldn't hold its longest sequence
    beside one of every other.
    """
    return merged_blocks(kv_bytes(size, services), [*map(block_bytes, services)], [*map(_longest, services)])


def merged_engine(group: Group, by_name: Mapping[str, SeaService], rule: Rule) -> Engine:
    """One of SeaLLM's: priorities over merged blocks."""
    services = [by_name[name] for name in group.services]
    blocks = merged(len(group.devices), services)
    assert blocks, "they fit"
    order = rule.order()
    loads = [
        _load(service, len(group.devices), MergedPool(blocks, block_bytes(service), BLOCK_SIZE), order)
        for service in services
    ]
    return Engine(group.devices, tuple(loads), PrioritySharing(rule.prompts_first), overhead(services))


def overhead(services: Sequence[SeaService]) -> float:
    """How much longer iterations take."""
    return sharing_overhead([block_bytes(service) for service in services])


def _load(service: SeaService, size: int, pool: KVPool, order: Order = fcfs, share: float = 1.0) -> Load:
    on = on_devices(service.llm, size)
    assert on, "it has room"
    limits = Limits(max_num_batched_tokens=PREFILL_TOKENS, decode_share=share)
    return Load(service.name, on.cost, (), pool, limits, order)


def dedicated_engine(group: Group, by_name: Mapping[str, SeaService], sharing: Sharing | None = None) -> Engine:
    """A service's own: prompts first, by arrival, as vLLM."""
    (service,) = [by_name[name] for name in group.services]
    total = int(kv_bytes(len(group.devices), [service]) // block_bytes(service))
    load = _load(service, len(group.devices), BlockPool(total, BLOCK_SIZE))
    return Engine(group.devices, (load,), sharing or TimeSharing())


def even_split(services: Sequence[SeaService], nodes: int) -> tuple[Group, ...] | None:
    """Devices in equal parts of powers of two, each service's at least what it needs; what is left over goes to those
    with the fewest, the larger LLMs first. None where there is no room.
    """
    sizes = {service.name: service.least for service in services}
    left = nodes * NODE - sum(sizes.values())
    while True:
        least = min(sizes.values())
        smallest = sorted(
            (service for service in services if sizes[service.name] == least), key=lambda s: -s.model.parameters
        )
        if least == NODE or least > left:
            break
        for service in smallest:
            if sizes[service.name] <= left:
                left -= sizes[service.name]
                sizes[service.name] *= 2
    return _packed(sizes, nodes) if left >= 0 else None


def _packed(sizes: Mapping[str, int], nodes: int) -> tuple[Group, ...] | None:
    """Groups of these powers of two, the largest first, so that none crosses a node."""
    groups, first = [], 0
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        groups.append(Group(tuple(range(first, first + size)), (name,)))
        first += size
    return tuple(groups) if first <= nodes * NODE else None


@dataclass(frozen=True, eq=False)
class History:
    """What a placement is searched on: services, their requests of the past, and what those take alone."""

    services: tuple[SeaService, ...]
    asked: Mapping[str, Asked]
    nodes: int
    rate_seq_s: float

    @property
    def by_name(self) -> dict[str, SeaService]:
        """Services by name."""
        return {service.name: service for service in self.services}


def fits(by_name: Mapping[str, SeaService]) -> Callable[[int, tuple[str, ...]], bool]:
    """Whether services have room on so many devices; what was found is kept."""
    known: dict[tuple[int, tuple[str, ...]], bool] = {}

    def has_room(size: int, names: tuple[str, ...]) -> bool:
        key = size, tuple(sorted(by_name[name].llm for name in names))
        if key not in known:
            services = [by_name[name] for name in names]
            known[key] = kv_bytes(size, services) > 0 and merged(size, services) is not None
        return known[key]

    return has_room


class Scoring:
    """Simulates placements. A service's replicas take its requests in turns, so that a group's outcome depends on its
    own services alone, and is simulated once.
    """

    def __init__(self, history: History, rule: Rule):
        self._history, self._rule = history, rule
        self._by_name = history.by_name
        self._known: dict[tuple[object, ...], dict[str, tuple[int, float, int]]] = {}

    def __call__(self, groups: tuple[Group, ...]) -> dict[str, Outcome]:
        """Outcomes of the services that have groups."""
        hosts: dict[str, int] = {}
        turns = []
        for group in groups:
            turns.append({name: hosts.get(name, 0) for name in group.services})
            for name in group.services:
                hosts[name] = hosts.get(name, 0) + 1
        sums: dict[str, tuple[int, float, int]] = {}
        for group, own in zip(groups, turns, strict=True):
            if group.services:
                parts = tuple((name, own[name], hosts[name]) for name in group.services)
                for name, counted in self._of(len(group.devices), parts).items():
                    before = sums.get(name, (0, 0.0, 0))
                    sums[name] = (before[0] + counted[0], before[1] + counted[1], before[2] + counted[2])
        return {name: Outcome(late, total / max(1, count), count) for name, (late, total, count) in sums.items()}

    def _of(self, size: int, parts: tuple[tuple[str, int, int], ...]) -> dict[str, tuple[int, float, int]]:
        """Requests that are late, the sum of normalised latencies, and requests, by service."""
        key = size, parts
        if key not in self._known:
            asked = {name: _part(self._history.asked[name], turn, of) for name, turn, of in parts}
            group = Group(tuple(range(size)), tuple(name for name, _, _ in parts))
            engine = merged_engine(group, self._by_name, self._rule)
            replay = replay_cluster([engine], {name: own.requests for name, own in asked.items()})
            self._known[key] = {name: _counted(self._by_name[name], own, replay) for name, own in asked.items()}
        return self._known[key]


def _part(asked: Asked, turn: int, of: int) -> Asked:
    requests = asked.requests
    return Asked(ServiceRequests(requests.lengths[turn::of], requests.hints[turn::of]), asked.alone_s[turn::of])


def _counted(service: SeaService, asked: Asked, replay: ClusterReplay) -> tuple[int, float, int]:
    latency = np.array([served.finish_s - served.arrival_s for served in replay.served[service.name]])
    late = int((latency > SLO * asked.alone_s).sum())
    return late, float(latency.sum()) / service.mean_s, len(latency)


def two_stage(history: History, rule: Rule) -> Placed:
    """SeaLLM's placement under a rule. Infeasible where none has all services."""
    services = [
        Service(s.name, history.rate_seq_s * s.popularity, len(history.asked[s.name].alone_s)) for s in history.services
    ]
    score = Scoring(history, rule)
    placed = place_in_stages(services, history.nodes, NODE, fits(history.by_name), score)
    if placed is None:
        raise Infeasible(f"No placement has all services on {history.nodes * NODE} devices.", None)
    return placed


def mux_engines(history: History) -> list[Engine] | None:
    """MuxServe's placement: meshes with shares of the multiprocessors, caches in quotas; None where it has none."""
    cluster = cluster_of(history.nodes)
    other = max(on.memory.workspace for s in history.services if (on := on_devices(s.llm, s.least))) + RESERVE_BYTES
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
        block_bytes(service) / BLOCK_SIZE,
        BLOCK_SIZE * _longest(service),
    )


def _mux_engine(mesh: Mesh, memory: float, by_name: Mapping[str, SeaService]) -> Engine:
    services = [by_name[occupant.popular.name] for occupant in mesh.occupants]
    parts = [service.model.layers * service.model.kv_heads for service in services]
    part_bytes = max(block_bytes(service) / part for service, part in zip(services, parts, strict=True))
    store = Store(int(memory / part_bytes))
    least = [part * _longest(service) for service, part in zip(services, parts, strict=True)]
    wanted = [o.popular.rate_seq_s * o.popular.kv_token_bytes for o in mesh.occupants]
    loads = []
    for service, occupant, part, own, want in zip(services, mesh.occupants, parts, least, wanted, strict=True):
        quota = own + int((store.total - sum(least)) * want / sum(wanted))
        pool = QuotaPool(store, part, BLOCK_SIZE, quota)
        loads.append(_load(service, len(mesh.devices), pool, fcfs, occupant.decode_share))
    return Engine(mesh.devices, tuple(loads), SpatialSharing(), overhead(services))


@dataclass(frozen=True)
class Figures:
    """What all requests met."""

    requests: int
    normalised: float
    """L_N: the mean of latency over L̂."""
    in_time: float
    """Share of requests within SLO times their own time alone."""
    tail_s: float
    """99th percentile of latency."""
    ttft_s: float
    tpot_s: float
    waiting: float
    """The part of L_N before the first prefill begins."""
    first: float
    """From then to the first token; the rest is decoding."""
    busy: float
    """Share of the engines' time in which a job runs, until the last request is done."""
    preemptions: int
    services_late: int
    """Services of which fewer than nine tenths are in time."""
    in_time_at: tuple[float, ...] = ()
    """Shares within the bounds of `SCALES` times the service's mean time alone."""


SCALES = (1.0, 2.0, 5.0, 10.0, 20.0)


def figures_of(services: Sequence[SeaService], asked: Mapping[str, Asked], replay: ClusterReplay) -> Figures:
    """What a replay comes to."""
    parts = [
        _columns(service, asked[service.name], replay) for service in services if asked[service.name].requests.lengths
    ]
    arrival, start, first, finish, alone, mean, outputs = np.concatenate(parts, axis=1)
    latency, many = finish - arrival, outputs > 1
    late = sum(float(np.mean(p[3] - p[0] <= SLO * p[4])) < 0.9 for p in parts)
    return Figures(
        len(latency),
        float((latency / mean).mean()),
        float((latency <= SLO * alone).mean()),
        float(np.percentile(latency, 99)),
        float((first - arrival).mean()),
        float(((finish - first)[many] / (outputs[many] - 1)).mean()),
        float(((start - arrival) / mean).mean()),
        float(((first - start) / mean).mean()),
        sum(replay.busy_s.values()) / (replay.engines * float(finish.max())),
        replay.preemptions,
        late,
        tuple(float((latency <= scale * mean).mean()) for scale in SCALES),
    )


def replay_of(asked: Mapping[str, Asked], engines: Sequence[Engine]) -> ClusterReplay:
    """All services' requests on these engines."""
    return replay_cluster(engines, {name: own.requests for name, own in asked.items()})


def _columns(service: SeaService, asked: Asked, replay: ClusterReplay) -> np.ndarray:
    """[7, requests]: arrival, start, first token and end in seconds, time alone, L̂, output tokens."""
    rows = [(s.arrival_s, s.start_s, s.first_token_s, s.finish_s, s.output_tokens) for s in replay.served[service.name]]
    times = np.array(rows, dtype=np.float64).T
    return np.vstack([times[:4], asked.alone_s, np.full(len(rows), service.mean_s), times[4]])
