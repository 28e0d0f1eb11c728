"""Predicted: what the schedule that is served is expected to give, by the simulator."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import xsimulator
from exegpt.engine_protocol import Opened
from exegpt.estimate import Estimate
from exegpt.policies import traits_of
from exegpt.schedule import Schedule
from exegpt.timeline import Span

_SPANS = 120
"""Of a timeline that are kept."""
_REQUESTS = 200
"""Of the simulated run: enough for several turnovers of the engine."""


@dataclass(frozen=True)
class Predicted:
    """The steady state."""

    estimate: Estimate | None
    """None where the policy has no closed form under this admission."""
    spans: tuple[Span, ...]
    """A stretch of a simulated run under load, on the first device."""

    @staticmethod
    async def of(opened: Opened) -> "Predicted":
        """Computed in a thread: a simulated run takes a while."""
        return await asyncio.to_thread(Predicted.now, opened)

    @staticmethod
    def now(opened: Opened) -> "Predicted":
        """The same, at once."""
        schedule, profile = opened.schedule, opened.profile
        estimate = xsimulator.estimate(schedule, profile) if xsimulator.has_steady_state(schedule) else None
        run = xsimulator.timeline(schedule, profile, requests=_REQUESTS)
        spans = [span for span in run.spans if span.device == 0 and span.phase != "overhead"]
        middle = max(0, len(spans) // 2 - _SPANS // 2)
        return Predicted(estimate, tuple(spans[middle : middle + _SPANS]))


def targets(schedule: Schedule) -> Mapping[str, float]:
    """The schedule's sequences of a micro-batch, by phase; those that its policy sets."""
    traits = traits_of(schedule)
    prompts, residents = traits.value(schedule, "prompts"), traits.value(schedule, "residents")
    decoding = traits.value(schedule, "target") or residents
    decoders = [stage for stage in schedule.stages if stage.phase != "encode"]
    at_once = schedule.micro_batches or max(1, len(decoders))
    sizes = {"encode": prompts, "decode": decoding, "mixed": decoding if traits.mixed else None}
    return {
        phase: size if phase == "encode" else ceil(size / at_once) for phase, size in sizes.items() if size is not None
    }
