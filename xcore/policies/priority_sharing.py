"""SeaLLM's rule of sharing: the model of the first request runs, with all its requests of the same kind."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from xcore.batching import Sequence
from xcore.batching.order import Order
from xcore.policies.sharing import Tenant, TenantT, Unit


@dataclass(frozen=True, slots=True)
class Candidate:
    """Work that a model could do: prefill waiting prompts, or decode its residents' next tokens."""

    key: object
    """Key of the first of its sequences."""
    place: int
    """Index of the model."""
    phase: Literal["encode", "decode"]
    first: Sequence

    @property
    def order(self) -> tuple[object, int]:
        """Return the sorting key: lower is earlier."""
        return self.key, self.place


class PrioritySharing:
    """Runs one job at a time on all devices, for the model and the phase of the request with the smallest key.

    The request may be waiting or resident; the choice is repeated at every iteration (SeaLLM's Algorithm 2). Prompts of
    one model are computed together, and so are all its residents' next tokens. The models' ledgers have orders of one
    kind, whose keys are comparable.

    With `prompts_first` the model is chosen by the same key, but computes its prompts before it decodes, as vLLM does.
    Under a doubling budget, Algorithm 2 lets prompts wait until all residents of their own model have ended, or used up
    their budgets.
    """

    def __init__(self, prompts_first: bool):
        self.prompts_first = prompts_first

    def start(self, unit: Unit[TenantT], now: float) -> None:
        """Start a job if none runs; end a row of iterations early if requests have arrived since its start."""
        if unit.running:
            (job,) = unit.running
            if any(_new(tenant, job.start_s, now) for tenant in unit.tenants):
                job.cut(now)
            return
        candidates = sorted(self._candidates(unit, now), key=lambda candidate: candidate.order)
        for candidate in candidates:
            tenant = unit.tenants[candidate.place]
            if candidate.phase == "encode":
                unit.prefill(tenant)
            else:
                alone = len(candidates) == 1
                lasts_s = _waiting_s(unit, now) if alone else _steady_s(unit, tenant, candidate.first, now)
                _decode(unit, tenant, now, lasts_s)
            if unit.running:
                return

    def _candidates(self, unit: Unit[TenantT], now: float) -> list[Candidate]:
        """Return each model's first waiting request that would be admitted, and its first resident."""
        found = []
        for place, tenant in enumerate(unit.tenants):
            prompts, residents = _prompts(tenant, place, now), _residents(tenant, place, now)
            if prompts and residents and self.prompts_first:
                first = min(prompts, residents, key=lambda own: own.order)
                found.append(Candidate(first.key, place, "encode", prompts.first))
            else:
                found += [candidate for candidate in (prompts, residents) if candidate]
        return found


def _decode(unit: Unit[TenantT], tenant: TenantT, now: float, lasts_s: float) -> None:
    """Start a row of decode iterations of a model that stays first for `lasts_s` seconds."""
    unit.decode(tenant, None if lasts_s > 0 else 1)
    if tenant.job and lasts_s < inf:  # the runner's rows are over at once
        tenant.job.cut(now + lasts_s)


def _prompts(tenant: Tenant, place: int, now: float) -> Candidate | None:
    if not tenant.can_prefill(now):
        return None
    first = tenant.first(now)
    assert first is not None, "it can be prefilled"
    return Candidate(_order(tenant).key(first, now), place, "encode", first)


def _residents(tenant: Tenant, place: int, now: float) -> Candidate | None:
    if not tenant.can_decode(now):
        return None
    key = _order(tenant).key
    best, _, first = min((key(sequence, now), n, sequence) for n, sequence in enumerate(tenant.ledger.decoding))
    return Candidate(best, place, "decode", first)


def _steady_s(unit: Unit[TenantT], tenant: TenantT, first: Sequence, now: float) -> float:
    """Return the seconds for which a model's first resident stays first if it runs and no request arrives.

    This is a lower bound: 0 for an order that can't predict it. The order then decides at every iteration.
    """
    lasts = getattr(_order(tenant), "steady_s", None)
    if lasts is None:
        return 0.0
    seconds: float = lasts(first, now)
    for other in unit.tenants:
        changes = getattr(_order(other), "next_change_s", None)
        if changes:
            idle = () if other is tenant else other.ledger.decoding
            seconds = min(seconds, changes(idle, now) - now)
    return seconds


def _waiting_s(unit: Unit[TenantT], now: float) -> float:
    """Return the seconds for which each model's first waiting prompt stays the same if no request arrives.

    Another prompt may have its blocks.
    """
    seconds = inf
    for tenant in unit.tenants:
        order = _order(tenant)
        changes = getattr(order, "next_change_s", None)
        if changes:
            seconds = min(seconds, changes((), now) - now)
        elif order.changes and len(tenant.ledger.waiting) > 1:
            return 0.0
    return seconds


def _new(tenant: Tenant, since: float, now: float) -> bool:
    """Return whether a prompt that has arrived since `since` can be computed."""
    first = tenant.first(now)
    return first is not None and first.arrival_s > since and tenant.can_prefill(now)


def _order(tenant: Tenant) -> Order:
    return tenant.ledger.waiting.order
