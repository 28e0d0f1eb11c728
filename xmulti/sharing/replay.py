"""Requests of several models through units of shared devices."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from xcore.batching import UNKNOWN, Hints, Ledger, Order, Sequence
from xcore.batching.kv_pool import KVPool
from xcore.orders import fcfs
from xcore.policies.one_phase import OnePhasePolicy
from xcore.policies.priority_sharing import PrioritySharing
from xcore.policies.sharing import Sharing, SpatialSharing, TimeSharing
from xcore.specs.request_times import RequestTimes
from xcore.specs.timeline import Span
from xcore.specs.workload import RequestLengths
from xmulti.sharing.iteration_cost import IterationCost
from xmulti.sharing.simulated_unit import SimulatedUnit
from xmulti.sharing.tenant import SimulatedTenant
from xsimulator.replay.event_queue import events
from xsimulator.replay.record import Record

SHARINGS: dict[str, Callable[[], Sharing]] = {
    "space": SpatialSharing,
    "time": partial(TimeSharing, in_order=False),
    "priority": partial(PrioritySharing, prompts_first=False),
}
"""How models share devices: by shares of their multiprocessors, by turns, or by their requests' keys."""

Stop = Callable[[Mapping[str, Items[RequestTimes]], float], bool]
"""Return whether to end a replay early, by each model's served requests and the time in seconds."""


@dataclass(frozen=True, eq=False)
class ModelLoad:
    """One model's requests on a unit, the cost of its iterations there, and the pool of its keys and values."""

    name: str
    cost: IterationCost
    requests: Items[RequestLengths]
    pool: KVPool
    limits: OnePhasePolicy = field(default_factory=OnePhasePolicy)
    order: Order = fcfs
    hints: Items[Hints] = ()
    """The order's hints on each request."""
    least: int | None = None
    """Blocks that its quota keeps while quotas follow their use; None: its quota is fixed."""
    switch_s: float = 0.0
    """Extra seconds of its iteration after another model's."""
    front_end_s: float = 0.0
    """Seconds of each request outside the engine."""


@dataclass(frozen=True)
class UnitReplay:
    """The results of the requests of a unit's models."""

    served: dict[str, tuple[RequestTimes, ...]]
    """By model, in order of completion."""
    preemptions: dict[str, int]
    busy_s: dict[str, float]
    """Seconds of each model's jobs."""
    spans: tuple[Span, ...]
    """Their stage is the model's place; empty if they weren't asked for."""

    @property
    def seconds(self) -> float:
        """Seconds until the last request is done."""
        return max((served[-1].finish_s for served in self.served.values() if served), default=0.0)


def replay_unit(
    loads: Items[ModelLoad],
    sharing: Literal["space", "time", "priority"] | Sharing,
    contention: float = 1.0,
    timeline: bool = False,
    step_by_step: bool = False,
    overhead: float = 1.0,
    stop: Stop | None = None,
) -> UnitReplay:
    """Run every model's requests on devices that they share.

    `contention`: factor by which an iteration takes longer if it begins during another model's. `overhead`: factor by
    which all iterations take longer. `stop`: when to skip the remaining requests.

    Raises:
        InputError: A pool could not hold a request.
    """
    records = {load.name: Record(len(load.requests), lambda _: 0, False, load.front_end_s) for load in loads}
    tenants = [_tenant(load, records[load.name]) for load in loads]
    rule = SHARINGS[sharing]() if isinstance(sharing, str) else sharing
    unit = SimulatedUnit(tenants, rule, contention, overhead, spans=[] if timeline else None, step_by_step=step_by_step)
    so_far = {name: record.served for name, record in records.items()}
    for now in events([unit]):
        if stop and stop(so_far, now):
            break
    for tenant in tenants:
        tenant.ledger.check()
    served = {n: tuple(sorted(r.served, key=lambda s: (s.finish_s, s.index))) for n, r in records.items()}
    preemptions = {tenant.name: tenant.ledger.preemptions for tenant in tenants}
    busy = {tenant.name: sum(tenant.busy_s.values()) for tenant in tenants}
    return UnitReplay(served, preemptions, busy, tuple(sorted(unit.spans or (), key=lambda span: span.start_s)))


def _tenant(load: ModelLoad, record: Record) -> SimulatedTenant:
    tenant = empty_tenant(load, record)
    tenant.ledger.submit(sequences_of(load.requests, load.hints))
    return tenant


def empty_tenant(load: ModelLoad, record: Record) -> SimulatedTenant:
    """Return a load's model before any of its requests has arrived."""
    ledger = Ledger(load.pool, load.order, admission="grow")
    return SimulatedTenant(load.name, ledger, load.cost, load.limits, record, load.least, load.switch_s)


def sequences_of(requests: Items[RequestLengths], hints: Items[Hints]) -> list[Sequence]:
    """Return the requests' sequences with their hints; without hints, the hints are unknown."""
    known = hints or (UNKNOWN,) * len(requests)
    return [
        Sequence(i, r.input, r.output, r.arrival_s, hints=own)
        for i, (r, own) in enumerate(zip(requests, known, strict=True))
    ]
