"""Quotas that follow the models' use: MuxServe's adaptation of a unit's KV caches, for simulator and runner.

A model's use of its quota is the share that its sequences hold while it decodes, averaged over the last iterations. A
model that uses nearly all and has more requests than usual gets up to a tenth more, from models that use less.
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
"""Largest growth at a time, as a share of the quota; at least one part."""
CROWDED = 1.1
"""Number of requests, relative to their mean, from which a quota grows."""
HEADROOM = 0.95
"""Use to which a quota may shrink."""
WINDOW = 500
"""Decode iterations that means cover, and that lie between two adaptations."""


class QuotaTenant(Protocol):
    """A model with a quota."""

    @property
    def ledger(self) -> Ledger:
        """Return the model's ledger, with its requests and its pool."""

    @property
    def ahead(self) -> int:
        """Return the blocks that the model's running iterations will still allocate before they end."""


@dataclass(eq=False)
class QuotaUsage:
    """Recent use of one model's quota."""

    tenant: QuotaTenant
    pool: QuotaPool | MergedPool
    least: int
    """Blocks that it keeps even if no request needs them."""
    jobs: deque[tuple[int, float, int]] = field(default_factory=deque)
    """For each decoding job: iterations, use of the quota, running and waiting requests."""
    iterations: int = 0
    """Sum of the iterations of these jobs."""

    def add(self, iterations: int, requests: int) -> None:
        """Count a job of `iterations` decode iterations."""
        self.jobs.append((iterations, (self.pool.held + self.tenant.ahead) / self.pool.total, requests))
        self.iterations += iterations
        while self.iterations - self.jobs[0][0] >= WINDOW:
            self.iterations -= self.jobs.popleft()[0]

    @property
    def use(self) -> float:
        """Return the mean share of the quota that was held; 0 before any job."""
        mean = sum([count * use for count, use, _ in self.jobs]) / max(1, self.iterations)
        return round(mean, 9)  # nine times 0.9 over nine is less than 0.9

    def crowded(self, requests: int) -> bool:
        """Return whether `requests` requests are more than usual."""
        mean = sum([count * number for count, _, number in self.jobs]) / max(1, self.iterations)
        return requests > CROWDED * mean

    @property
    def spare(self) -> int:
        """Return the parts of its quota that the model can give away.

        It keeps the parts that it used, with some headroom. It also keeps the blocks that it holds, that its running
        iterations will allocate, and that each of its requests may need.
        """
        pool, ledger = self.pool, self.tenant.ledger
        longest = max(map(ledger.most_blocks, [*ledger.resident, *ledger.waiting]), default=0)
        kept = pool.parts_for(max(self.least, longest, pool.held + self.tenant.ahead))
        return max(0, int(pool.quota - max(self.use / HEADROOM * pool.quota, kept)))


class QuotaAdaptation:
    """The quotas of one memory's pools; their sum is constant."""

    def __init__(self, least: Mapping[QuotaTenant, int]):
        """Adapt the quotas of these models in one memory, if any.

        `least` gives the blocks that each model keeps even without requests.
        """
        self._usages: dict[QuotaTenant, QuotaUsage] = {}
        for tenant, blocks in least.items():
            pool = tenant.ledger.pool
            assert isinstance(pool, QuotaPool | MergedPool), "models with quotas"
            self._usages[tenant] = QuotaUsage(tenant, pool, blocks)
        self._since = 0
        """Iterations since the last adaptation."""

    def decoded(self, tenant: QuotaTenant, iterations: int, now: float) -> None:
        """Count a model's decoding job at its end, and adapt the quotas from time to time.

        A model whose quota is fixed is ignored.
        """
        if tenant not in self._usages:
            return
        self._usages[tenant].add(iterations, _requests(tenant, now))
        self._since += iterations
        if self._since >= WINDOW:
            self._since = 0
            self.adapt(now)

    def adapt(self, now: float) -> None:
        """Grow the quotas that are used up; other quotas shrink in proportion to their spare parts."""
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


def _apportioned(parts: int, weights: Mapping[QuotaUsage, int]) -> dict[QuotaUsage, int]:
    """Distribute whole parts in proportion to weights, by the largest remainders.

    All parts are distributed. If there are at most as many parts as the sum of the weights, no member gets more than
    its weight.
    """
    total = sum(weights.values())
    if not total:
        return {}
    shares = {usage: divmod(parts * weight, total) for usage, weight in weights.items()}
    left = parts - sum(whole for whole, _ in shares.values())
    first = sorted(shares, key=lambda usage: -shares[usage][1])[:left]
    return {usage: whole + (usage in first) for usage, (whole, _) in shares.items()}


def _requests(tenant: QuotaTenant, now: float) -> int:
    """Count the running and waiting requests."""
    ledger = tenant.ledger
    return ledger.residents + ledger.waiting.arrived(now)
