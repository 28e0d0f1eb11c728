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

    With an `adjustment`, it chooses them for their lengths. With a `forecast`, it admits as many as are likely to find
    blocks until the next ones join.
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
        fits = self.forecast.outlook(ledger.pool, ledger.resident).admits if self.forecast else None
        if self.adjustment:
            return _admit_chosen(self.adjustment, ledger, now, fits)
        most = self._prompts(ledger.waiting.first(count, now), count) if self.forecast else count
        return ledger.admit(most, now, fits=fits)

    def _prompts(self, first: list[Sequence], count: int) -> int:
        """Return how many of the first sequences have as much work as `count` prompts.

        A preempted sequence counts for more, since its output is prefilled too.
        """
        work = accumulate(max(1.0, s.to_prefill / self.input_mean) if s.recomputed else 1.0 for s in first)
        return max(1, bisect_right(list(work), count))


def _admit_chosen(adjustment: Adjustment, ledger: Ledger, now: float, fits: Fits | None) -> list[Sequence]:
    """Admit the sequences that an adjustment chooses, and count for the others how often they are passed over.

    Sequences are exchanged only if they come by arrival: any other order decides itself which ones come first.
    """
    waiting = ledger.waiting
    candidates = waiting.first(adjustment.encode_batch * PEEKED_BATCHES, now)
    if not candidates:
        return []
    chosen = adjustment.choose(candidates, ledger.residents, exchange=waiting.by_arrival)
    admitted = ledger.admit_these(chosen, now, fits)
    if admitted:
        for candidate in candidates[: candidates.index(admitted[-1])]:
            candidate.passed_over += not candidate.blocks
    return admitted
