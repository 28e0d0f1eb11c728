"""Joining: which waiting sequences are encoded together next, in RRA and in WAA."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from xcore.batching import Fits, Forecast, Ledger, Sequence
from xcore.batching.admission import ADMISSIONS
from xcore.policies.adjustment import PEEKED_BATCHES, Adjustment
from xcore.policies.control import PolicyContext


@dataclass(frozen=True)
class Joining:
    """Admits waiting sequences from the front of the queue.

    With an `adjustment`, it picks them for their lengths. With a `forecast`, it admits as many as will probably find
    blocks until the next batch joins.
    """

    input_mean: float = 1.0
    """Mean tokens of a prompt."""
    adjustment: Adjustment | None = None
    forecast: Forecast | None = None

    @staticmethod
    def of(context: PolicyContext, iterations: int) -> "Joining":
        """Build the joining of a schedule whose next batch joins after `iterations` decode iterations."""
        grows, workload = ADMISSIONS[context.admission].grows, context.workload
        forecast = Forecast(workload.output, iterations) if grows else None
        return Joining(workload.input.mean, context.adjustment, forecast)

    def admit(self, ledger: Ledger, now: float, count: int) -> list[Sequence]:
        """Admit about `count` waiting sequences."""
        if not self.forecast:
            return self._admit(ledger, now, count)
        outlook = self.forecast.outlook(ledger.pool, ledger.resident)
        return self._admit(ledger, now, self._prompts(ledger.waiting.first(count, now), count), outlook.admits)

    def _admit(self, ledger: Ledger, now: float, count: int, fits: Fits | None = None) -> list[Sequence]:
        if self.adjustment is None:
            return ledger.admit(count, now, fits=fits)
        candidates = ledger.waiting.first(count * PEEKED_BATCHES, now)
        return ledger.admit_these(self.adjustment.pick(candidates, count), now, fits)

    def _prompts(self, first: list[Sequence], count: int) -> int:
        """Return how many of the first sequences have as much work as `count` prompts.

        A preempted sequence counts for more, since its output is prefilled too.
        """
        work = accumulate(max(1.0, s.to_prefill / self.input_mean) if s.recomputed else 1.0 for s in first)
        return max(1, bisect_right(list(work), count))
