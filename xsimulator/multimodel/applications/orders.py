"""Orders of waiting LLM calls by the applications that they belong to; lower keys are earlier."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from exegpt.batching import Sequence
from exegpt.orders.gittins import Gittins, RankedDemand
from xsimulator.multimodel.applications.demand import ServiceRates
from xsimulator.multimodel.applications.progress import SubmissionProgress


@dataclass(eq=False)
class WaitingCall:
    """A call on the LLM, some of whose parallel requests may run already."""

    progress: SubmissionProgress
    arrival_s: float
    index: int
    """By arrival; unique."""
    requests: list[Sequence] = field(default_factory=list)
    """Its requests that wait."""
    running: int = 0
    """How many others haven't ended."""
    begun: bool = False
    """Whether the first prompts have been computed."""
    turn_s: float | None = None
    """When what it needs of a cache was first looked for: a place in the batch was free."""
    loaded_s: float | None = None
    """When that is there for it."""

    def begin(self, requests: int) -> list[Sequence]:
        """The first so many of the requests that wait, which begin."""
        begun, self.requests = self.requests[:requests], self.requests[requests:]
        self.running += requests
        self.progress.begin(requests)
        return begun

    def end(self) -> bool:
        """One of its requests has made all tokens; whether it was the last."""
        self.running -= 1
        self.progress.end(1)
        return not self.running and not self.requests


class ApplicationOrder(Protocol):
    """Which call's requests begin first."""

    def key(self, job: WaitingCall, now: float) -> Any:
        """Lower is earlier."""


class ByRequest:
    """vLLM: first come, first served, by request."""

    def key(self, job: WaitingCall, now: float) -> tuple[float, int]:
        """When the call came."""
        return job.arrival_s, job.index


class ByApplication:
    """Parrot: first come, first served, by application."""

    def key(self, job: WaitingCall, now: float) -> tuple[float, int]:
        """When the application came."""
        return job.progress.arrival_s, job.index


class VirtualTokens:
    """VTC: the client that was served least first; a new one, or one that comes again, begins at the least counter of
    those that are there.
    """

    def key(self, job: WaitingCall, now: float) -> tuple[float, int]:
        """The client's counter."""
        return job.progress.client.virtual_tokens, job.index


class EarliestDeadline:
    """EDF; applications without deadlines behind all others, by arrival."""

    def key(self, job: WaitingCall, now: float) -> tuple[bool, float, int]:
        """The deadline."""
        deadline_s = job.progress.application.deadline_s
        return deadline_s is None, job.arrival_s if deadline_s is None else deadline_s, job.index


class LowestMean:
    """SRPT on means: expected demand less attained service, which may become negative."""

    def key(self, job: WaitingCall, now: float) -> tuple[float, int]:
        """E[X] - a."""
        return _demand(job).mean - job.progress.since_estimate_s, job.index


class Oracle:
    """SRPT on true demands: what no scheduler knows."""

    def __init__(self, rates: ServiceRates):
        self._rates = rates
        self._total_s: dict[int, float] = {}

    def key(self, job: WaitingCall, now: float) -> tuple[float, int]:
        """Seconds of service that remain."""
        application = job.progress.application
        if application.index not in self._total_s:
            self._total_s[application.index] = sum(call.service_s(self._rates) for call in application.calls)
        return self._total_s[application.index] - job.progress.attained_s, job.index


def _demand(job: WaitingCall) -> RankedDemand:
    demand = job.progress.demand
    assert demand is not None, "demand is estimated before a call waits"
    return demand


def application_gittins() -> Gittins[WaitingCall]:
    """Hermes: the Gittins rank of the application's demand."""
    return Gittins(_demand, lambda job: job.progress.since_estimate_s)


class ApplicationSlack:
    """Hermes with deadlines: S = deadline - now - (sup X - a), ascending, parallel requests counted by the longest.

    What remains is at least 0: an application that outlasted all of its samples is about to end. Applications without
    deadlines come behind all others, by their Gittins rank. With `demote`, so do those that are too late even if the
    least of the samples that remain possible is all that they demand.
    """

    def __init__(self, demote: bool = False) -> None:
        self._demote = demote
        self._gittins = application_gittins()

    def key(self, job: WaitingCall, now: float) -> tuple[Any, ...]:
        """The slack in seconds."""
        progress, deadline_s, longest = job.progress, job.progress.application.deadline_s, job.progress.longest
        if deadline_s is None:
            return 2, *self._gittins.key(job, now)
        assert longest is not None, "demand is estimated before a call waits"
        attained_s = progress.since_estimate_s / progress.call.parallel
        if self._demote and now + max(0.0, longest.next_sample(attained_s) - attained_s) > deadline_s:
            return 1, *self._gittins.key(job, now)
        return 0, deadline_s - now - max(0.0, longest.most - attained_s), job.index
