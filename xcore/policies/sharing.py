"""Rules of sharing: which of several models runs next on devices that they have together, in the simulator and in the
runner.

MuxServe's adaptive batch scheduling gives each job its share of the multiprocessors; time sharing gives each all of
them, one after the other.
"""

from collections.abc import Sequence as Items
from typing import Any, Protocol

from xcore.batching import Ledger, Sequence


class Job(Protocol):
    """What a model runs now: a prefill, or a row of decoding iterations."""

    @property
    def phase(self) -> str:
        """`encode` or `decode`."""

    @property
    def share(self) -> float:
        """Of the devices."""

    def cut(self, now: float) -> None:
        """End the row with the iteration that runs at `now`."""


class Tenant(Protocol):
    """A model on shared devices."""

    @property
    def ledger(self) -> Ledger:
        """Its requests."""

    @property
    def job(self) -> Any:
        """What it runs now, or None."""

    @property
    def idle_since_s(self) -> float:
        """When its last job ended."""

    @property
    def limits(self) -> Any:
        """`prefill_share` and `decode_share`, of the multiprocessors."""

    def first(self, now: float) -> Sequence | None:
        """The waiting prompt that is admitted next, if its blocks are free."""

    def can_prefill(self, now: float) -> bool:
        """Whether it would be admitted now."""

    def can_decode(self, now: float) -> bool:
        """Whether it has sequences to decode."""


class Unit(Protocol):
    """Devices that several models share."""

    @property
    def tenants(self) -> Items[Any]:
        """The models."""

    @property
    def running(self) -> Items[Any]:
        """The jobs that run."""

    @property
    def used(self) -> float:
        """The shares of all jobs that run."""

    def prefill(self, tenant: Any) -> None:
        """Start a model's prompts."""

    def decode(self, tenant: Any, most: int | None = None) -> None:
        """Start a model's decoding, at most so many iterations in a row, unless all are preempted."""


class Sharing(Protocol):
    """Which model runs next, on what share."""

    def start(self, unit: Unit, now: float) -> None:
        """Start all that may run now, by `unit.prefill` and `unit.decode`; cut rows that are in the way."""


def in_turn(unit: Unit) -> list[Tenant]:
    """The models that run nothing, beginning with the one that has for longest."""
    return sorted((t for t in unit.tenants if t.job is None), key=lambda t: t.idle_since_s)


class SpatialSharing:
    """Jobs beside each other within their shares (MuxServe's ADBS).

    Prompts first, in turns, one prefill at a time; while one could run but for the multiprocessors that decoding has,
    no other decoding begins; then decoding in turns on what is left.
    """

    OVERLAP = 0.3
    """By how much the shares together may exceed the devices."""

    def __init__(self, overlap: float = OVERLAP):
        self._most = 1.0 + overlap + 1e-9
        self._next = 0
        """The place of the model after the last that prefilled."""

    def start(self, unit: Unit, now: float) -> None:
        """Start a prefill if none runs, and decoding beside it."""
        prefilling = any(job.phase == "encode" for job in unit.running)
        waits = not prefilling and self._must_wait(unit, now)
        if not waits:
            decoding = [tenant for tenant in in_turn(unit) if tenant.can_decode(now)]
            shares = unit.used + sum(tenant.limits.decode_share for tenant in decoding)
            waits = shares > self._most and len(decoding) + len(unit.running) > 1
            for tenant in decoding:
                if self._fits(unit, tenant.limits.decode_share):
                    unit.decode(tenant, 1 if waits else None)
        if waits:  # each row gives way after the iteration that runs
            for job in unit.running:
                job.cut(now)

    def _must_wait(self, unit: Unit, now: float) -> bool:
        """Start the first prefill that can run; whether there is one that can't for want of devices."""
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

    def _fits(self, unit: Unit, share: float) -> bool:
        return not unit.running or unit.used + share <= self._most


class TimeSharing:
    """One job at a time on whole devices: prompts first, by arrival over all models, then decoding in turns.

    `in_order`: no prompt overtakes one of another model that lacks blocks. Models with one memory need that: a large
    block would never be free while small ones are asked for.
    """

    def __init__(self, in_order: bool):
        self._in_order = in_order

    def start(self, unit: Unit, now: float) -> None:
        """Start a job if none runs; a row ends where a prompt waits."""
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

    def _first(self, unit: Unit, now: float) -> Tenant | None:
        """The model whose prompt is next; None where there is none, or it must wait."""
        arrivals = [
            (first.arrival_s, place)
            for place, tenant in enumerate(unit.tenants)
            if (first := tenant.first(now)) and (self._in_order or tenant.can_prefill(now))
        ]
        return _if_it_can_prefill(unit, arrivals, now)

    def _rows(self, unit: Unit, now: float) -> list[tuple[Tenant, int | None]]:
        """Who may decode, in order of preference, and for how many iterations in a row."""
        decoding = [tenant for tenant in in_turn(unit) if tenant.can_decode(now)]
        return [(tenant, 1 if len(decoding) > 1 else None) for tenant in decoding]


class FirstComeSharing(TimeSharing):
    """First come, first served over all models (the baseline in MuxServe's repository, `fcfs_schedule`).

    No prompt overtakes an earlier one, whatever that one waits for: blocks, or a place among its model's sequences. The
    model decodes that has the resident who arrived first, until a resident ends.
    """

    def __init__(self) -> None:
        super().__init__(in_order=True)

    def _first(self, unit: Unit, now: float) -> Tenant | None:
        arrivals = [
            (first.arrival_s, place)
            for place, tenant in enumerate(unit.tenants)
            if (first := tenant.ledger.waiting.peek(now)) and first.ready_s <= now
        ]
        return _if_it_can_prefill(unit, arrivals, now)

    def _rows(self, unit: Unit, now: float) -> list[tuple[Tenant, int | None]]:
        decoding = [tenant for tenant in unit.tenants if tenant.can_decode(now)]
        return [(tenant, None) for tenant in sorted(decoding, key=_oldest_s)]


def _if_it_can_prefill(unit: Unit, arrivals: list[tuple[float, int]], now: float) -> Tenant | None:
    """The model of the earliest arrival, by its place, if it can prefill."""
    if not arrivals:
        return None
    tenant: Tenant = unit.tenants[min(arrivals)[1]]
    return tenant if tenant.can_prefill(now) else None


def _oldest_s(tenant: Tenant) -> float:
    """When the first of its residents arrived."""
    return min(sequence.arrival_s for sequence in tenant.ledger.decoding)
