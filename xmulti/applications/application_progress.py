"""Progress of applications, as orders and prewarming see it."""

from typing import Protocol

from xcore.applications.demand import Seen, ServiceRates
from xcore.orders.gittins import RankedDemand
from xcore.orders.ranked_demands import RankedDemands
from xmulti.applications.submission import Call, Submission


class Iterations(Protocol):
    """A counter of an LLM's iterations."""

    @property
    def done(self) -> int:
        """Decoding iterations so far."""


class Account:
    """Tokens served, of an application or of a client."""

    def __init__(self, counter: Iterations):
        self.prompt_tokens = 0
        self.lifted = 0.0
        """Virtual tokens credited to a client for the time in which it had no requests."""
        self.active = 0
        """Number of a client's unfinished applications."""
        self._counter = counter
        self._decoded = 0
        self._decoding = 0
        self._began = 0
        """Sum of the iterations at which the currently decoding requests began."""

    @property
    def output_tokens(self) -> int:
        """Output tokens so far, including those of currently decoding requests."""
        return self._decoded + self._decoding * self._counter.done - self._began

    @property
    def virtual_tokens(self) -> float:
        """VTC's counter: a prompt token counts as a tenth of an output token."""
        return self.lifted + self.prompt_tokens / 10 + self.output_tokens

    def begin(self, requests: int, call: Call) -> None:
        """Count `requests` of a call as prefilled; they decode from now on."""
        self.prompt_tokens += requests * call.input_tokens
        self._decoding += requests
        self._began += requests * self._counter.done

    def end(self, requests: int, call: Call) -> None:
        """Count `requests` of a call as finished."""
        self._decoding -= requests
        self._began -= requests * (self._counter.done - call.output_tokens)
        self._decoded += requests * call.output_tokens


class SubmissionProgress:
    """An application from its arrival to its end."""

    def __init__(self, application: Submission, rates: ServiceRates, counter: Iterations, client: Account):
        self.application = application
        self.index = application.index
        self.arrival_s = application.arrival_s
        self.client = client
        self.position = 0
        """Index of the current call."""
        self.finish_s: float | None = None
        self.demand: RankedDemand | None = None
        """Estimated service from `_base_s` on."""
        self.longest: RankedDemand | None = None
        """The same for the longest of parallel requests only."""
        self.seen: Seen | None = None
        self._account = Account(counter)
        self._rates = rates
        self._base_s = 0.0
        self._other_s = 0.0
        """Service of finished calls on other backends."""

    @property
    def call(self) -> Call:
        """The current call."""
        return self.application.calls[self.position]

    @property
    def attained_s(self) -> float:
        """Service so far; calls on other backends count when they have ended."""
        tokens, rates = self._account, self._rates
        return tokens.prompt_tokens * rates.prefill_s + tokens.output_tokens * rates.decode_s + self._other_s

    @property
    def since_estimate_s(self) -> float:
        """Service since demand was estimated."""
        return self.attained_s - self._base_s

    def begin(self, requests: int) -> None:
        """Count `requests` requests of its call as begun."""
        for account in (self._account, self.client):
            account.begin(requests, self.call)

    def end(self, requests: int) -> None:
        """Count `requests` requests of its call as ended."""
        for account in (self._account, self.client):
            account.end(requests, self.call)

    def leave(self) -> None:
        """Move on from the current call, which has ended."""
        call = self.call
        if call.on_llm:
            self.seen = Seen(call.unit, call.input_tokens, call.output_tokens, call.parallel)
        else:
            self._other_s += call.seconds
        self.position += 1

    def expect(self, demand: RankedDemand, longest: RankedDemand) -> None:
        """Set the demand that is expected from now on."""
        self.demand, self.longest, self._base_s = demand, longest, self.attained_s


class DemandEstimates(RankedDemands):
    """The expected demand of every application: estimated at its arrival, or refined at each of its calls."""

    def update(self, progress: SubmissionProgress) -> None:
        """Update the estimate before the application's current call."""
        name = progress.application.name
        if self.refine:
            progress.expect(*self.refined(name, progress.call.unit, progress.seen))
        elif progress.position == 0:
            progress.expect(*self.prior(name))
