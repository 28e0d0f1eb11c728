"""SeaLLM's rule of sharing: whoever's request comes first runs, with all of its kind."""

from typing import Any, Literal

from exegpt.policies.sharing import Tenant, Unit


class PrioritySharing:
    """One job at a time on whole devices: the model and the phase of the request with the smallest key of all, waiting
    or resident, decided anew at every iteration (SeaLLM's Algorithm 2).

    Prompts of one model are computed together, as are all its residents' next tokens. The models' ledgers have orders
    of one kind, whose keys compare.
    """

    def start(self, unit: Unit, now: float) -> None:
        """Start a job if none runs; a row gives way to whoever arrives, or comes first meanwhile."""
        if unit.running:
            if any(tenant.can_prefill(now) for tenant in unit.tenants):
                unit.running[0].cut(now)
            return
        candidates = sorted(
            [*self._prompts(unit, now), *self._residents(unit, now)], key=lambda candidate: candidate[:2]
        )
        for _, place, phase in candidates:
            if phase == "encode":
                unit.prefill(unit.tenants[place])
            else:
                unit.decode(unit.tenants[place], 1 if len(candidates) > 1 else None)
            if unit.running:
                return

    def _prompts(self, unit: Unit, now: float) -> list[tuple[Any, int, Literal["encode", "decode"]]]:
        """Each model's first waiting request that would be admitted."""
        found: list[tuple[Any, int, Literal["encode", "decode"]]] = []
        for place, tenant in enumerate(unit.tenants):
            if tenant.can_prefill(now):
                first = tenant.ledger.waiting.peek(now)
                assert first is not None, "it can be prefilled"
                found.append((_order(tenant).key(first, now), place, "encode"))
        return found

    def _residents(self, unit: Unit, now: float) -> list[tuple[Any, int, Literal["encode", "decode"]]]:
        """Each model's first resident."""
        return [
            (min(_order(tenant).key(sequence, now) for sequence in tenant.ledger.decoding), place, "decode")
            for place, tenant in enumerate(unit.tenants)
            if tenant.can_decode(now)
        ]


def _order(tenant: Tenant) -> Any:
    return tenant.ledger.waiting.order
