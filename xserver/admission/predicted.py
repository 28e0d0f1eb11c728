"""Predicted: the simulated performance of the current schedule."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import xsimulator
from xcore.requests.engine_protocol import Opened
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import Span

_SPANS = 120
"""Number of spans kept of the first device; the other devices keep the spans of the same time."""
_REQUESTS = 200
"""Number of requests of the simulated run: enough to replace the engine's sequences several times."""


@dataclass(frozen=True)
class Predicted:
    """The predicted steady state of a schedule, and a section of a simulated run."""

    estimate: Estimate | None
    """The estimate; None if the policy has no closed form under this admission."""
    spans: tuple[Span, ...]
    """The spans of a section of a simulated run under load."""

    @staticmethod
    async def of(opened: Opened) -> "Predicted":
        """Compute the prediction in a thread: a simulated run takes a while."""
        return await asyncio.to_thread(Predicted.now, opened)

    @staticmethod
    def now(opened: Opened) -> "Predicted":
        """Compute the prediction in this thread."""
        schedule, profile = opened.schedule, opened.profile
        estimate = xsimulator.estimate(schedule, profile) if xsimulator.has_steady_state(schedule) else None
        run = xsimulator.timeline(schedule, profile, requests=_REQUESTS)
        spans = [span for span in run.spans if span.phase != "overhead"]
        first = [span for span in spans if span.device == 0]
        middle = max(0, len(first) // 2 - _SPANS // 2)
        shown = first[middle : middle + _SPANS]
        since_s, until_s = (shown[0].start_s, shown[-1].end_s) if shown else (0.0, 0.0)
        return Predicted(estimate, tuple(s for s in spans if since_s <= s.start_s and s.end_s <= until_s))


def targets(schedule: Schedule) -> Mapping[str, float]:
    """Return the schedule's target of sequences per micro-batch, by phase, if its policy sets one."""
    control = schedule.control
    prompts, decoding = control.of_kind("prompts"), control.of_kind("target") or control.of_kind("residents")
    decoders = [stage for stage in schedule.stages if stage.phase != "encode"]
    at_once = control.micro_batching(max(1, len(decoders))).count
    sizes = {"encode": prompts, "decode": decoding, "mixed": decoding if schedule.traits.mixed else None}
    return {
        phase: size if phase == "encode" else ceil(size / at_once) for phase, size in sizes.items() if size is not None
    }
