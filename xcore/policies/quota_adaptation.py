"""Quotas that follow what models use: MuxServe's adaptation of the KV caches of a unit, in the simulator and in the
runner.

A model uses its quota to the share that its sequences hold of it while it decodes, in the mean of the last iterations.
One that uses nearly all and has more requests than usual gets up to a tenth more, from those that use less.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from xcore.batching import Ledger
from xcore.batching.shared_pool import MergedPool, QuotaPool

FULL = 0.9
"""Use from which a quota may grow."""
GROWTH = 0.1
"""By how much, at most, at a time; by one part where that is less."""
CROWDED = 1.1
"""Requests, over their mean, from which it does."""
HEADROOM = 0.95
"""Use to which a quota may shrink."""
WINDOW = 500
"""Decoding iterations that means are of, and between two adaptations."""


class Tenant(Protocol):
    """A model with a quota."""

    @property
    def ledger(self) -> Ledger:
        """Its requests, and its pool."""

    @property
    def ahead(self) -> int:
        """Blocks that its running row of iterations will have taken when it ends, and the pool hasn't given yet."""


@dataclass(eq=False)
class Usage:
    """Recent use of one model's quota."""

    tenant: Tenant
    pool: QuotaPool | MergedPool
    least: int
    """Blocks that it keeps though it has no request that needs them."""
    jobs: deque[tuple[int, float, int]] = field(default_factory=deque)
    """Of each decoding job: iterations, use of the quota, requests that ran or waited."""
    iterations: int = 0
    """Of these jobs."""

    def add(self, iterations: int, requests: int) -> None:
        """Count a job of so many decoding iterations."""
        self.jobs.append((iterations, (self.pool.held + self.tenant.ahead) / self.pool.total, requests))
        self.iterations += iterations
        while self.iterations - self.jobs[0][0] >= WINDOW:
            self.iterations -= self.jobs.popleft()[0]

    @property
    def use(self) -> float:
        """The mean share of the quota that was held; 0 before any job."""
        return sum([count * use for count, use, _ in self.jobs]) / max(1, self.iterations)

    def crowded(self, requests: int) -> bool:
        """Whether so many requests are more than usual."""
        mean = sum([count * number for count, _, number in self.jobs]) / max(1, self.iterations)
        return requests > CROWDED * mean

    @property
    def spare(self) -> int:
        """Parts that it can give away: it keeps what it used, with some room; all that it holds, or that the row of
        iterations that runs will take; and what each of its requests may need.
        """
        pool, ledger = self.pool, self.tenant.ledger
        longest = max(map(ledger.most_blocks, [*ledger.resident, *ledger.waiting]), default=0)
        kept = pool.parts_for(max(self.least, longest, pool.held + self.tenant.ahead))
        return max(0, int(pool.quota - max(self.use / HEADROOM * pool.quota, kept)))


class QuotaAdaptation:
    """The quotas of one memory's pools, whose sum stays."""

    def __init__(self, least: Mapping[Tenant, int]):
        """Models whose quotas of one memory follow their use, if any, and the blocks that each keeps though it has no
        request.
        """
        self._usages: dict[Tenant, Usage] = {}
        for tenant, blocks in least.items():
            pool = tenant.ledger.pool
            assert isinstance(pool, QuotaPool | MergedPool), "models with quotas"
            self._usages[tenant] = Usage(tenant, pool, blocks)
        self._since = 0
        """Iterations since the last adaptation."""

    def decoded(self, tenant: Tenant, iterations: int, now: float) -> None:
        """Count a model's decoding job at its end; from time to time quotas change. Of a model whose quota stays:
        nothing.
        """
        if tenant not in self._usages:
            return
        self._usages[tenant].add(iterations, _requests(tenant, now))
        self._since += iterations
        if self._since >= WINDOW:
            self._since = 0
            self.adapt(now)

    def adapt(self, now: float) -> None:
        """Let quotas that are used up grow, at the cost of others in proportion to what they spare."""
        usages = list(self._usages.values())
        wanted = {
            usage: max(1, int(GROWTH * usage.pool.quota))
            for usage in usages
            if usage.use >= FULL and usage.crowded(_requests(usage.tenant, now))
        }
        spare = {usage: usage.spare for usage in usages if usage.use < FULL}
        moved = min(sum(wanted.values()), sum(spare.values()))
        for usage, parts in _apportioned(moved, spare).items():
            usage.pool.resize(usage.pool.quota - parts)
        for usage, parts in _apportioned(moved, wanted).items():
            usage.pool.resize(usage.pool.quota + parts)


def _apportioned(parts: int, weights: Mapping[Usage, int]) -> dict[Usage, int]:
    """Whole parts in proportion to weights, by the largest remainders: all of them, and to none more than its weight
    where they are no more than the weights' sum.
    """
    total = sum(weights.values())
    if not total:
        return {}
    shares = {usage: divmod(parts * weight, total) for usage, weight in weights.items()}
    left = parts - sum(whole for whole, _ in shares.values())
    first = sorted(shares, key=lambda usage: -shares[usage][1])[:left]
    return {usage: whole + (usage in first) for usage, (whole, _) in shares.items()}


def _requests(tenant: Tenant, now: float) -> int:
    """Requests that run, or wait."""
    ledger = tenant.ledger
    return ledger.residents + ledger.waiting.arrived(now)
