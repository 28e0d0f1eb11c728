"""Rules of sharing: which of several models runs next on common devices, in the simulator and in the runner.

MuxServe's adaptive batch scheduling gives each job its share of the multiprocessors. Time sharing gives each job all of
them, one after the other.
"""

from collections.abc import Sequence as Items
from typing import Protocol, TypeVar

from xcore.batching import FollowingOrder, Ledger, Sequence
from xcore.policies.one_phase import OnePhasePolicy


class Job(Protocol):
    """A model's iterations that run. Times are in seconds."""

    @property
    def phase(self) -> str:
        """Return `encode` or `decode`."""

    @property
    def start_s(self) -> float:
        """Return when it began."""

    def cut(self, now: float) -> None:
        """End the row of iterations with the one that runs at `now`."""


class Tenant(Protocol):
    """A model on shared devices."""

    @property
    def ledger(self) -> Ledger:
        """Return the ledger of the model's requests."""

    @property
    def job(self) -> Job | None:
        """Return the model's running job, or None."""

    @property
    def idle_since_s(self) -> float:
        """Return when the model's last job ended."""

    @property
    def limits(self) -> OnePhasePolicy:
        """Return the model's limits."""

    def first(self, now: float) -> Sequence | None:
        """Return the waiting prompt that is admitted next, if its blocks are free."""

    def can_prefill(self, now: float) -> bool:
        """Return whether the prompt of `first` would be admitted now."""

    def can_decode(self, now: float) -> bool:
        """Return whether the model has sequences to decode."""


TenantT = TypeVar("TenantT", bound=Tenant)


class Unit(Protocol[TenantT]):
    """Devices that several models share."""

    @property
    def tenants(self) -> Items[TenantT]:
        """Return the models."""

    @property
    def running(self) -> Items[Job]:
        """Return the running jobs."""

    @property
    def used(self) -> float:
        """Return the sum of the shares of all running jobs."""

    def prefill(self, tenant: TenantT) -> None:
        """Start a model's prompts."""

    def decode(self, tenant: TenantT, most: int | None = None) -> None:
        """Start a model's decoding, up to `most` iterations in a row, unless all its sequences are preempted."""


class Sharing(Protocol):
    """Decides which model runs next, and on what share."""

    def start(self, unit: Unit[TenantT], now: float) -> None:
        """Start all jobs that may run now, by `unit.prefill` and `unit.decode`; end rows that block them."""


def in_turn(unit: Unit[TenantT]) -> list[TenantT]:
    """Return the models without a running job, the longest idle one first."""
    return sorted((t for t in unit.tenants if t.job is None), key=lambda t: t.idle_since_s)


class SpatialSharing:
    """Runs jobs at the same time, each within its share (MuxServe's ADBS).

    Prompts come first, in turns, one prefill at a time. While a prefill lacks only the multiprocessors that decoding
    has, no other decoding begins. Decoding then runs in turns on the remaining multiprocessors.
    """

    OVERLAP = 0.3
    """How much the sum of the shares may exceed the devices."""

    def __init__(self, overlap: float = OVERLAP):
        self._most = 1.0 + overlap + 1e-9
        self._next = 0
        """The index of the model after the last one that prefilled."""

    def start(self, unit: Unit[TenantT], now: float) -> None:
        """Start a prefill if none runs, and decoding at the same time."""
        prefilling = any(job.phase == "encode" for job in unit.running)
        waits = not prefilling and self._must_wait(unit, now)
        if not waits:
            decoding = [tenant for tenant in in_turn(unit) if tenant.can_decode(now)]
            shares = unit.used + sum(tenant.limits.decode_share for tenant in decoding)
            waits = shares > self._most and len(decoding) + len(unit.running) > 1
            for tenant in decoding:
                if self._fits(unit, tenant.limits.decode_share):
                    unit.decode(tenant, 1 if waits else None)
        if waits:  # each row ends after its running iteration
            for job in unit.running:
                job.cut(now)

    def _must_wait(self, unit: Unit[TenantT], now: float) -> bool:
        """Start the first prefill that can run; if none can, return whether one lacks only devices."""
        blocked, count = False, len(unit.tenants)
        for place in range(self._next, self._next + count):
            tenant = unit.tenants[place % count]
            if not tenant.can_prefill(now):
                continue
            if tenant.job is None and self._fits(unit, tenant.limits.prefill_share):
                unit.prefill(tenant)
                self._next = place + 1
                return False
            blocked = True
        return blocked

    def _fits(self, unit: Unit[TenantT], share: float) -> bool:
        return not unit.running or unit.used + share <= self._most


class TimeSharing:
    """Runs one job at a time on whole devices: prompts first, in order over all models, then decoding in turns.

    The order is that of arrival, or that of the models' ledgers, whose keys are then comparable.

    `in_order`: no prompt overtakes one of another model that lacks blocks. Models with one memory need this: a large
    block would never be free while small ones are allocated.
    """

    def __init__(self, in_order: bool):
        self._in_order = in_order

    def start(self, unit: Unit[TenantT], now: float) -> None:
        """Start a job if none runs; a row of iterations ends if a prompt waits."""
        first = self._first(unit, now)
        if unit.running:
            if first:
                unit.running[0].cut(now)
            return
        if first:
            unit.prefill(first)
            return
        for tenant, most in self._rows(unit, now):
            unit.decode(tenant, most)
            if unit.running:
                return

    def _first(self, unit: Unit[TenantT], now: float) -> TenantT | None:
        """Return the model whose prompt is next; None if there is none, or it must wait."""
        turns = [
            (_turn(tenant, first, now), place)
            for place, tenant in enumerate(unit.tenants)
            if (first := tenant.first(now)) and (self._in_order or tenant.can_prefill(now))
        ]
        return _if_it_can_prefill(unit, turns, now)

    def _rows(self, unit: Unit[TenantT], now: float) -> list[tuple[TenantT, int | None]]:
        """Return the models that may decode, in order of preference, and for how many iterations in a row."""
        decoding = [tenant for tenant in in_turn(unit) if tenant.can_decode(now)]
        return [(tenant, 1 if len(decoding) > 1 else None) for tenant in decoding]


class FirstComeSharing(TimeSharing):
    """First come, first served over all models (the baseline in MuxServe's repository, `fcfs_schedule`).

    No prompt overtakes an earlier one, even if that one waits for blocks or for a place among its model's sequences.
    The model of the earliest resident decodes, until a resident ends.
    """

    def __init__(self) -> None:
        super().__init__(in_order=True)

    def _first(self, unit: Unit[TenantT], now: float) -> TenantT | None:
        arrivals: list[tuple[object, int]] = [
            (first.arrival_s, place)
            for place, tenant in enumerate(unit.tenants)
            if (first := tenant.ledger.waiting.peek(now)) and first.last_token_s <= now
        ]
        return _if_it_can_prefill(unit, arrivals, now)

    def _rows(self, unit: Unit[TenantT], now: float) -> list[tuple[TenantT, int | None]]:
        decoding = [tenant for tenant in unit.tenants if tenant.can_decode(now)]
        return [(tenant, None) for tenant in sorted(decoding, key=_oldest_s)]


def _turn(tenant: Tenant, first: Sequence, now: float) -> object:
    """Return the key by which a model's first prompt is compared with those of other models."""
    waiting = tenant.ledger.waiting
    if waiting.by_arrival:
        return first.arrival_s
    order, key = waiting.order, waiting.order.key(first, now)
    if isinstance(order, FollowingOrder) and order.grouped:
        return order.group_key(order.group(first)), key
    return key


def _if_it_can_prefill(unit: Unit[TenantT], turns: list[tuple[object, int]], now: float) -> TenantT | None:
    """Return the model of the earliest turn, by its index, if it can prefill."""
    if not turns:
        return None
    tenant = unit.tenants[min(turns)[1]]
    return tenant if tenant.can_prefill(now) else None


def _oldest_s(tenant: Tenant) -> float:
    """Return when the first of a model's residents arrived."""
    return min(sequence.arrival_s for sequence in tenant.ledger.decoding)
