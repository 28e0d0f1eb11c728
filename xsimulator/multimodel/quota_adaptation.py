"""Quotas that follow what models use: MuxServe's adaptation of the KV caches of a unit.

A model uses its quota to the share that its sequences hold of it while it decodes, in the mean of the last iterations.
One that uses nearly all and has more requests than usual gets up to a tenth more, from those that use less.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from exegpt.batching.shared_pool import QuotaPool
from xsimulator.multimodel.tenant import Tenant

FULL = 0.9
"""Use from which a quota may grow."""
GROWTH = 0.1
"""By how much, at most, at a time."""
CROWDED = 1.1
"""Requests, over their mean, from which it does."""
HEADROOM = 0.95
"""Use to which a quota may shrink."""
WINDOW = 500
"""Decoding iterations that means are of, and between two adaptations."""


@dataclass(eq=False)
class Usage:
    """What one model has used of late."""

    tenant: Tenant
    pool: QuotaPool
    least: int
    """Blocks that it keeps, whatever it uses."""
    jobs: deque[tuple[int, float, int]] = field(default_factory=deque)
    """Of each decoding job: iterations, use of the quota, requests that ran or waited."""
    iterations: int = 0
    """Of these jobs."""

    def add(self, iterations: int, requests: int) -> None:
        """A job has decoded so many iterations, and isn't booked yet."""
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


class QuotaAdaptation:
    """The quotas of one store's pools, whose sum stays."""

    def __init__(self, least: Mapping[Tenant, int]):
        """Models with quotas of one store, and the blocks that the longest sequence of each needs."""
        self._usages: dict[Tenant, Usage] = {}
        for tenant, blocks in least.items():
            assert isinstance(tenant.ledger.pool, QuotaPool), "models with quotas"
            self._usages[tenant] = Usage(tenant, tenant.ledger.pool, blocks)
        self._since = 0
        """Iterations since the last adaptation."""

    def decoded(self, tenant: Tenant, iterations: int, now: float) -> None:
        """A model's job has decoded, and isn't booked yet; from time to time quotas change."""
        self._usages[tenant].add(iterations, _requests(tenant, now))
        self._since += iterations
        if self._since >= WINDOW:
            self._since = 0
            self.adapt(now)

    def adapt(self, now: float) -> None:
        """Let quotas that are used up grow, at the cost of others in proportion to what they spare."""
        usages = list(self._usages.values())
        wanting = [u for u in usages if u.use >= FULL and u.crowded(_requests(u.tenant, now))]
        spare = {usage: _spare(usage) for usage in usages if usage.use < FULL}
        wanted = {usage: GROWTH * usage.pool.quota for usage in wanting}
        share = min(1.0, sum(wanted.values()) / (sum(spare.values()) or 1.0))
        taken = {usage: int(share * parts) for usage, parts in spare.items()}
        for usage, given in taken.items():
            usage.pool.resize(usage.pool.quota - given)
        for usage, parts in wanted.items():
            usage.pool.resize(usage.pool.quota + int(sum(taken.values()) * parts / sum(wanted.values())))


def _spare(usage: Usage) -> float:
    """Parts of a store that a model can give away: it keeps what it used, with some room, and all that it holds or that
    the row of iterations that runs will take.
    """
    pool = usage.pool
    blocks = max(usage.least, pool.held + usage.tenant.ahead)
    return max(0.0, pool.quota - max(usage.use / HEADROOM * pool.quota, blocks * pool.parts))


def _requests(tenant: Tenant, now: float) -> int:
    """Requests that run, or wait."""
    ledger = tenant.ledger
    return ledger.residents + ledger.waiting.arrived(now)
