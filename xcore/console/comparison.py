"""Comparison of predicted and measured results: one schedule, one list of requests, the same arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from xcore.document import to_dict
from xcore.requests.request import Result
from xcore.specs.change import Change
from xcore.specs.estimate import Estimate
from xcore.specs.request_times import RequestTimes, steady_tokens_s
from xcore.specs.schedule import Schedule
from xcore.specs.slowdown import Slowdown
from xcore.specs.timeline import Timeline

KEYS = (
    "throughput_seq_s",
    "throughput_tok_s",
    "latency_s",
    "latency_p50_s",
    "latency_p99_s",
    "ttft_s",
    "tpot_s",
    "ttft_p99_s",
    "tpot_p99_s",
)
"""Figures of an Estimate that a run measures."""


@dataclass(frozen=True)
class Comparison:
    """A run of `schedule`, its replay over the same requests, and its steady-state estimate."""

    schedule: Schedule
    measured: Estimate
    predicted: Estimate
    steady: Estimate | None
    """None: no closed form is known."""
    results: tuple[Result, ...]
    served: tuple[RequestTimes, ...]
    seconds: float
    measured_timeline: Timeline
    predicted_timeline: Timeline
    changes: tuple[Change, ...] = ()
    """Schedules that took over during the run; the predictions are of the first schedule."""
    preemptions: int = 0
    predicted_preemptions: int = 0
    reused: int = 0
    """Tokens of prompts that were found in the cache."""
    predicted_reused: int = 0
    slowdown: Slowdown = field(default_factory=Slowdown)
    """The machine's slowdown around the run; predictions are scaled by it."""

    @property
    def tokens(self) -> int:
        """Return the number of generated output tokens."""
        return sum(len(r.output_ids) for r in self.results)

    @property
    def steady_measured_tok_s(self) -> float | None:
        """Return the output tokens per second between ramp-up and drain; None if the run is too short.

        `steady` predicts this rate.
        """
        return steady_tokens_s(self.served)

    @property
    def holds_bound(self) -> bool | None:
        """Return whether the measured latency meets the schedule's bound; None if there is none."""
        bound, latency = self.schedule.latency_bound_s, self.measured.latency_s
        return None if bound is None or latency is None else latency <= bound

    def error(self) -> dict[str, float | None]:
        """Return (measured − predicted) / measured by figure; None if either is unknown or nothing was measured."""
        return {key: relative(getattr(self.measured, key), getattr(self.predicted, key)) for key in KEYS}

    def document(self) -> dict[str, object]:
        """Return the object that `run --json` prints."""
        return {
            **to_dict(self.measured),
            "requests": len(self.results),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "steady_tok_s": self.steady_measured_tok_s,
            "phase_s": self.measured_timeline.phase_means(),
            "predicted": {**to_dict(self.predicted), "phase_s": self.predicted_timeline.phase_means()},
            "predicted_steady": to_dict(self.steady) if self.steady else None,
            "error": self.error(),
            "slowdown": to_dict(self.slowdown),
            "preemptions": {"measured": self.preemptions, "predicted": self.predicted_preemptions},
            "reused_tokens": {"measured": self.reused, "predicted": self.predicted_reused},
            "changes": [to_dict(change) for change in self.changes],
        }


def relative(measured: float | None, predicted: float | None) -> float | None:
    """Return (measured − predicted) / measured."""
    return None if measured is None or predicted is None or measured == 0 else (measured - predicted) / measured


def median(runs: Sequence[Comparison]) -> Comparison:
    """Return the run of median duration."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
