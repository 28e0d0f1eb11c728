"""How far an application has come: what orders and prewarming look at."""

from typing import Protocol

from exegpt.orders.gittins import RankedDemand
from xsimulator.multimodel.applications.demand import ApplicationDemand, DemandSamples, Seen, ServiceRates
from xsimulator.multimodel.applications.submission import Call, Submission


class Iterations(Protocol):
    """What counts an LLM's iterations."""

    @property
    def done(self) -> int:
        """Decoding iterations so far."""


class Account:
    """Tokens served, of an application or of a client."""

    def __init__(self, counter: Iterations):
        self.prompt_tokens = 0
        self.lifted = 0.0
        """Virtual tokens that a client got for the time in which it asked for nothing."""
        self.active = 0
        """A client's applications that haven't ended."""
        self._counter = counter
        self._decoded = 0
        self._decoding = 0
        self._began = 0
        """Sum of the iterations at which the requests that decode now began."""

    @property
    def output_tokens(self) -> int:
        """Decoded so far, requests that decode now among them."""
        return self._decoded + self._decoding * self._counter.done - self._began

    @property
    def virtual_tokens(self) -> float:
        """VTC's counter: a prompt's token counts as a tenth of an output's."""
        return self.lifted + self.prompt_tokens / 10 + self.output_tokens

    def begin(self, requests: int, call: Call) -> None:
        """So many requests of a call are prefilled, and decode from here on."""
        self.prompt_tokens += requests * call.input_tokens
        self._decoding += requests
        self._began += requests * self._counter.done

    def end(self, requests: int, call: Call) -> None:
        """So many requests of a call have made all their tokens."""
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
        """Of its current call."""
        self.finish_s: float | None = None
        self.demand: RankedDemand | None = None
        """Service from `_base_s` on."""
        self.longest: RankedDemand | None = None
        """The same with the longest of parallel requests alone."""
        self.seen: Seen | None = None
        self._account = Account(counter)
        self._rates = rates
        self._base_s = 0.0
        self._other_s = 0.0
        """Of calls that ended on other backends."""

    @property
    def call(self) -> Call:
        """The current one."""
        return self.application.calls[self.position]

    @property
    def attained_s(self) -> float:
        """Service so far, of calls on other backends when they have ended."""
        tokens, rates = self._account, self._rates
        return tokens.prompt_tokens * rates.prefill_s + tokens.output_tokens * rates.decode_s + self._other_s

    @property
    def since_estimate_s(self) -> float:
        """Service since demand was estimated."""
        return self.attained_s - self._base_s

    def begin(self, requests: int) -> None:
        """So many requests of its call begin."""
        for account in (self._account, self.client):
            account.begin(requests, self.call)

    def end(self, requests: int) -> None:
        """So many requests of its call have ended."""
        for account in (self._account, self.client):
            account.end(requests, self.call)

    def leave(self) -> None:
        """The current call has ended."""
        call = self.call
        if call.on_llm:
            self.seen = Seen(call.unit, call.input_tokens, call.output_tokens, call.parallel)
        else:
            self._other_s += call.seconds
        self.position += 1

    def expect(self, demand: RankedDemand, longest: RankedDemand) -> None:
        """Demand from here on."""
        self.demand, self.longest, self._base_s = demand, longest, self.attained_s


class DemandEstimates:
    """What every application is expected to demand: at its arrival, or refined at each of its calls."""

    def __init__(self, models: dict[str, ApplicationDemand], refine: bool = True):
        """`models` by the application's name."""
        self.models = models
        self.refine = refine
        self._ranked: dict[int, tuple[DemandSamples, RankedDemand, RankedDemand]] = {}
        """By the demand's identity: refined ones are the same object for the same observations."""

    def update(self, progress: SubmissionProgress) -> None:
        """Before the application's current call."""
        model = self.models[progress.application.name]
        if self.refine:
            demand = model.refined(progress.call.unit, progress.seen)
        elif progress.position == 0:
            demand = model.prior
        else:
            return
        if id(demand) not in self._ranked:
            ranked = (RankedDemand(samples.tolist()) for samples in demand)
            self._ranked[id(demand)] = (demand, *ranked)  # type: ignore[assignment]
        _, total, longest = self._ranked[id(demand)]
        progress.expect(total, longest)
