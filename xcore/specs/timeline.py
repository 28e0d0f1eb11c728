"""Timeline: spans of work by device, in one form for the simulator and the runner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Phase = Literal["encode", "decode", "mixed", "overhead"]


@dataclass(frozen=True, slots=True)
class Span:
    """One micro-batch on one device. Times are in seconds since the timeline began."""

    device: int
    stage: int
    phase: Phase
    micro_batch: int
    start_s: float
    end_s: float
    sequences: int = 0
    tokens: int = 0
    """Number of computed tokens: those of prompts and new ones together."""


@dataclass(frozen=True)
class Timeline:
    """Spans in order of their start."""

    source: Literal["predicted", "measured"]
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Return the seconds from zero to the end of the last span."""
        return max((span.end_s for span in self.spans), default=0.0)

    def phase_seconds(self) -> dict[str, float]:
        """Return the busy seconds by phase, summed over devices."""
        total: dict[str, float] = {}
        for span in self.spans:
            total[span.phase] = total.get(span.phase, 0.0) + span.end_s - span.start_s
        return total

    def phase_means(self) -> dict[str, float]:
        """Return the mean seconds of one span by phase."""
        counts: dict[str, int] = {}
        for span in self.spans:
            counts[span.phase] = counts.get(span.phase, 0) + 1
        return {phase: seconds / counts[phase] for phase, seconds in self.phase_seconds().items()}


def chrome_trace(
    timelines: Sequence[Timeline], models: Mapping[tuple[int, int], str] = MappingProxyType({})
) -> dict[str, object]:
    """Convert timelines to the Chrome trace event format, which Perfetto opens, next to each other.

    There is one process per timeline and device, and one thread per stage; times are in microseconds. `models` names
    the threads of the first timeline by device and stage, if several models share a device.
    """
    events: list[dict[str, object]] = []
    named: set[int] = set()
    for number, timeline in enumerate(timelines):
        for span in timeline.spans:
            pid = number * 1000 + span.device
            if pid not in named:
                named.add(pid)
                name = f"{timeline.source} · device {span.device}"
                events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
            events.append(
                {
                    "ph": "X",
                    "name": span.phase,
                    "cat": timeline.source,
                    "pid": pid,
                    "tid": span.stage,
                    "ts": span.start_s * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": {"micro_batch": span.micro_batch, "sequences": span.sequences, "tokens": span.tokens},
                }
            )
    for (device, stage), model in models.items():
        events.append({"ph": "M", "name": "thread_name", "pid": device, "tid": stage, "args": {"name": model}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
