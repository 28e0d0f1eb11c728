"""How evenly a run works: the spread of encoding batches, of B_D and of iterations on the first stage of each side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array
from xcore.specs.request_times import RequestTimes
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import Span, Timeline


@dataclass(frozen=True)
class TimeSpread:
    """A mean, a standard deviation, and the range of 99 % of all values."""

    mean: float
    std: float
    half_range: float
    """Half of the distance between the 0.5th and the 99.5th percentile: 99 % of all values are within twice this."""

    @staticmethod
    def of(values: Array) -> "TimeSpread":
        """Return the spread of the middle three fifths of a run's values."""
        kept = values[len(values) // 5 : -(len(values) // 5)]
        low, high = np.percentile(kept, (0.5, 99.5))
        return TimeSpread(float(kept.mean()), float(kept.std()), float(high - low) / 2)

    def __str__(self) -> str:
        return f"{self.mean:9.4g} ± {self.std / self.mean:5.1%}"


@dataclass(frozen=True)
class Evenness:
    """A run's spreads."""

    tokens: TimeSpread
    encode_s: TimeSpread
    decode_batch: TimeSpread
    iteration_s: TimeSpread
    throughput_seq_s: float


def evenness(schedule: Schedule, timeline: Timeline, served: Sequence[RequestTimes]) -> Evenness:
    """Measure a run of one replica by the spans of the first stage of each side."""
    encoder, decoder = (
        next(stage.devices[0] for stage in schedule.stages if stage.phase in ("both", phase))
        for phase in ("encode", "decode")
    )
    encodes = list(_steps(s for s in timeline.spans if s.device == encoder and s.phase == "encode"))
    decodes = list(_steps(s for s in timeline.spans if s.device == decoder and s.phase == "decode"))
    starts, batches = _array([s[0].start_s for s in decodes]), _array([sum(p.sequences for p in s) for s in decodes])
    if encoder == decoder:
        joined = np.unique(np.searchsorted(starts, [step[-1].end_s - 1e-9 for step in encodes]))
    else:
        joined = 1 + np.flatnonzero(np.diff(batches) > 0)
    ends = np.sort([request.finish_s for request in served])
    kept = ends[len(ends) // 5 : -(len(ends) // 5)]
    return Evenness(
        TimeSpread.of(_array([sum(span.tokens for span in step) for step in encodes])),
        TimeSpread.of(_array([step[-1].end_s - step[0].start_s for step in encodes])),
        TimeSpread.of(batches[joined[joined < len(batches)]]),
        TimeSpread.of(_array([step[-1].end_s - step[0].start_s for step in decodes])),
        (len(kept) - 1) / float(kept[-1] - kept[0]),
    )


def _array(values: Sequence[float]) -> Array:
    return np.array(values, dtype=np.float64)


def _steps(spans: Iterator[Span]) -> Iterator[list[Span]]:
    """Group a stage's spans into steps: the micro-batches of one have rising numbers."""
    step: list[Span] = []
    for span in spans:
        if step and span.micro_batch <= step[-1].micro_batch:
            yield step
            step = []
        step.append(span)
    if step:
        yield step
