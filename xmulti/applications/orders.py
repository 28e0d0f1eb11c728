"""Orders of waiting LLM calls by their applications; a lower key is earlier."""

from dataclasses import dataclass, field
from typing import Protocol

from xcore.applications.demand import ServiceRates
from xcore.batching import Sequence
from xcore.orders.gittins import Gittins, RankedDemand
from xmulti.applications.application_progress import SubmissionProgress


@dataclass(eq=False)
class WaitingCall:
    """An LLM call; some of its parallel requests may already be running."""

    progress: SubmissionProgress
    arrival_s: float
    index: int
    """Unique; by arrival."""
    requests: list[Sequence] = field(default_factory=list)
    """Its waiting requests."""
    running: int = 0
    """Number of its running requests."""
    begun: bool = False
    """Whether the first prompts have been computed."""
    turn_s: float | None = None
    """When its cache entry was first needed: a place in the batch was free."""
    loaded_s: float | None = None
    """When its cache entry is loaded."""

    def begin(self, requests: int) -> list[Sequence]:
        """Remove and return the first `requests` waiting requests, which start now."""
        begun, self.requests = self.requests[:requests], self.requests[requests:]
        self.running += requests
        self.progress.begin(requests)
        return begun

    def end(self) -> bool:
        """Count one finished request.

        Return whether it was the call's last one.
        """
        self.running -= 1
        self.progress.end(1)
        return not self.running and not self.requests


class ApplicationOrder(Protocol):
    """The order in which calls start."""

    def key(self, job: WaitingCall, now: float) -> object:
        """Return the call's sort key; lower is earlier."""


class ByRequest:
    """Orders calls by their own arrival (vLLM)."""

    def key(self, job: WaitingCall, now: float) -> tuple[float, int]:
        """Return the call's arrival."""
        return job.arrival_s, job.index


class ByApplication:
    """Orders calls by their application's arrival (Parrot)."""

    def key(self, job: WaitingCall, now: float) -> tuple[float, int]:
        """Return the application's arrival."""
        return job.progress.arrival_s, job.index


class VirtualTokens:
    """Orders calls by their client's counter of service, the lowest first (VTC).

    A new or returning client starts at the least counter of the active ones.
    """

    def key(self, job: WaitingCall, now: float) -> tuple[float, int]:
        """Return the client's counter."""
        return job.progress.client.virtual_tokens, job.index


class EarliestDeadline:
    """Orders calls by their application's deadline (EDF); those without deadlines come last, by arrival."""

    def key(self, job: WaitingCall, now: float) -> tuple[bool, float, int]:
        """Return the deadline."""
        deadline_s = job.progress.application.deadline_s
        return deadline_s is None, job.arrival_s if deadline_s is None else deadline_s, job.index


class LowestMean:
    """Orders calls by expected remaining service: mean demand minus attained service, which may become negative."""

    def key(self, job: WaitingCall, now: float) -> tuple[float, int]:
        """Return the expected remaining service, E[X] - a."""
        return _demand(job).mean - job.progress.since_estimate_s, job.index


class Oracle:
    """Orders calls by true remaining service, which no real scheduler knows."""

    def __init__(self, rates: ServiceRates):
        self._rates = rates
        self._total_s: dict[int, float] = {}

    def key(self, job: WaitingCall, now: float) -> tuple[float, int]:
        """Return the seconds of remaining service."""
        application = job.progress.application
        if application.index not in self._total_s:
            self._total_s[application.index] = sum(call.service_s(self._rates) for call in application.calls)
        return self._total_s[application.index] - job.progress.attained_s, job.index


def _demand(job: WaitingCall) -> RankedDemand:
    demand = job.progress.demand
    assert demand is not None, "demand is estimated before a call waits"
    return demand


def application_gittins() -> Gittins[WaitingCall]:
    """Return Hermes' order: by the Gittins rank of the application's demand."""
    return Gittins(_demand, lambda job: job.progress.since_estimate_s)


class ApplicationSlack:
    """Orders calls by slack S = deadline - now - (sup X - a), ascending (Hermes with deadlines).

    For parallel requests the longest counts. The remaining time is at least 0: an application that has outlasted all of
    its samples is about to end. Applications without deadlines come last, by their Gittins rank. With `demote`, so do
    applications that are late even for the least sample that is still possible.
    """

    def __init__(self, demote: bool = False) -> None:
        self._demote = demote
        self._gittins = application_gittins()

    def key(self, job: WaitingCall, now: float) -> tuple[object, ...]:
        """Return the slack in seconds."""
        progress, deadline_s, longest = job.progress, job.progress.application.deadline_s, job.progress.longest
        if deadline_s is None:
            return 2, *self._gittins.key(job, now)
        assert longest is not None, "demand is estimated before a call waits"
        attained_s = progress.since_estimate_s / progress.call.parallel
        if self._demote and now + max(0.0, longest.next_sample(attained_s) - attained_s) > deadline_s:
            return 1, *self._gittins.key(job, now)
        return 0, deadline_s - now - max(0.0, longest.most - attained_s), job.index
