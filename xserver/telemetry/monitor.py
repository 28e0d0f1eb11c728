"""Monitor: receives all events of a model and passes them to the metrics, the recent history, the log and traces."""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from xcore.requests.engine_protocol import Opened, Stepped
from xcore.specs.schedule import Schedule
from xserver.admission.admission_control import Promise
from xserver.admission.predicted import Predicted, targets
from xserver.engines.engine_link import EngineLink
from xserver.http.answered import Answered, MissReason, first_token_s, kind_of, outcome_of, per_token_s, started_s
from xserver.http.generation import Choice
from xserver.telemetry.metrics import Metrics
from xserver.telemetry.observed import Observed
from xserver.telemetry.reporting import reporting
from xserver.telemetry.request_reports import Reports


@dataclass(frozen=True)
class Arrival:
    """A request whose body has been read."""

    at_s: float
    """The time, by the monotonic clock."""
    parent: Mapping[str, str]
    """The trace headers of the caller, if any."""
    again: bool = False
    """Whether the client marks it as a retry."""


@dataclass(frozen=True)
class Answering:
    """Data about a request that can be answered."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    promise: Promise | None
    """None: it joined another request."""
    preemptions: int
    """Preemptions of all the model's sequences before it."""


@dataclass(frozen=True)
class Exchange:
    """A finished request with its answer."""

    request_id: str
    path: str
    arrival: Arrival
    status: int | None
    """Status of the answer; None: the client disconnected before the last byte was sent."""
    code: str | None
    """Code of an error."""
    answering: Answering | None
    """None: it could not be answered."""
    client_id: str | None = None
    """The X-Request-Id that the client has given."""


class Monitor:
    """The monitor of one model."""

    def __init__(self, link: EngineLink, model: str, reports: Reports):
        self._link, self._model, self._reports = link, model, reports
        self.observed = Observed(time.monotonic())
        self.metrics = Metrics(model, self.batch_sizes, self.queued, self.kv_usage)
        self.predicted: Predicted | None = None
        self.restarts = 0
        self.preemptions = 0
        """Preemptions of all engines."""
        self._engine_preemptions = 0
        self._lost_s = self._rescheduled_s = float("-inf")
        self._schedule: Schedule | None = None

    # ---- events ----

    @reporting("monitor")
    def opened(self, opened: Opened) -> None:
        """Note a new engine or a new schedule."""
        if self._schedule not in (None, opened.schedule):
            self._rescheduled_s = time.monotonic()
            self.metrics.reschedules.inc()
        self._schedule = opened.schedule
        self.observed.opened(time.monotonic())
        with reporting("metrics"):
            self.metrics.opened(opened.schedule, targets(opened.schedule))
        self._predicting = asyncio.ensure_future(self._predict(opened))

    async def _predict(self, opened: Opened) -> None:
        with reporting("prediction"):
            self.predicted = await Predicted.of(opened)

    def lost(self) -> None:
        """Record that there is no engine now."""
        self._lost_s = time.monotonic()

    @reporting("monitor")
    def restarting(self) -> None:
        """Count a restart of a lost engine."""
        self.restarts += 1
        self.metrics.restarts.inc()

    @reporting("monitor")
    def stepped(self, stepped: Stepped) -> None:
        """Count a step of the engine."""
        count = stepped.occupancy.preemptions
        preempted = count - self._engine_preemptions if count >= self._engine_preemptions else count  # of a new ledger
        self._engine_preemptions = count
        self.preemptions += preempted
        with reporting("metrics"):
            self.metrics.stepped(stepped, preempted)
        if self._link.opened:
            self.observed.stepped(stepped, preempted, self._link.zero_s, time.monotonic())

    def ended(self, exchange: Exchange) -> None:
        """Count and report a request that has ended."""
        arrival, answering = exchange.arrival, exchange.answering
        now_s = time.monotonic()
        choices = answering.choices if answering else ()
        outcome = outcome_of(exchange.status, choices)
        promise = answering.promise if answering else None
        opened = self._link.opened
        bound_s = opened.schedule.latency_bound_s if opened and promise and not promise.long else None
        latency_s, undisturbed = now_s - arrival.at_s, self._lost_s < arrival.at_s
        start_s = started_s(choices) if promise else None
        first_s = first_token_s(choices) if promise else None
        tokens = [choice.taken if choice.finish_reason else len(choice.output.tokens) for choice in choices]
        begun = [choice for choice in choices if choice.output.start_s is not None] if promise else []
        caching = opened is not None and opened.schedule.prefix_caching
        told = promise if promise and undisturbed and math.isfinite(promise.start_s) else None
        missed = outcome == "answered" and bound_s is not None and latency_s > bound_s
        answered = Answered(
            exchange.request_id,
            self._model,
            exchange.path,
            exchange.status or 499,
            outcome,
            kind_of(promise, outcome == "answered"),
            exchange.code,
            now_s,
            latency_s,
            ttft_s=first_s - arrival.at_s if first_s is not None else None,
            tpot_s=per_token_s(choices) if promise else (),
            queue_wait_s=start_s - arrival.at_s if start_s is not None else None,
            wait_error_s=start_s - told.start_s if start_s is not None and told else None,
            end_error_s=now_s - told.end_s(max(tokens)) if told and outcome == "answered" else None,
            prompt_tokens=answering.prompt_tokens if answering and promise else 0,
            output_tokens=sum(tokens),
            looked_up_tokens=sum(len(choice.request.prompt_ids) for choice in begun) if caching else 0,
            cached_tokens=sum(choice.output.cached_tokens for choice in begun),
            bound_s=bound_s,
            client_id=exchange.client_id,
            miss=self._miss(arrival, answering) if answering and missed else None,
        )
        with reporting("metrics"):
            self.metrics.answered(answered)
        with reporting("history"):
            self.observed.answered(answered)
        self._reports.answered(answered, arrival.parent, choices if promise else ())

    def _miss(self, arrival: Arrival, answering: Answering) -> MissReason:
        """Return why the bound was missed.

        The engine doesn't report which sequence it preempts, so any preemption counts.
        """
        if self._lost_s >= arrival.at_s:
            return "restart"
        if self._rescheduled_s >= arrival.at_s:
            return "reschedule"
        return "preempted" if self.preemptions > answering.preemptions else "mispredicted"

    # ---- the current state ----

    def queued(self) -> tuple[int, int]:
        """Return the numbers of waiting and running sequences."""
        count, last = len(self._link.outputs), self._link.last
        if self._link.opened is None or last is None:
            return count, 0
        running = min(count, last.occupancy.encoding + last.occupancy.decoding)
        return count - running, running

    def kv_usage(self) -> float:
        """Return the share of KV blocks in use."""
        last = self._link.last
        if self._link.opened is None or last is None or not self._link.outputs:
            return 0.0
        return last.occupancy.used_blocks / max(1, last.occupancy.total_blocks)

    def batch_sizes(self) -> dict[str, float]:
        """Return the recent mean number of sequences per micro-batch, by phase."""
        return self.observed.sizes(time.monotonic())
