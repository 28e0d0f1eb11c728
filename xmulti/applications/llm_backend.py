"""An LLM that applications share: a unit with one model, filled in an order over applications."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, islice

from xcore.applications.demand import ServiceRates
from xcore.applications.demand_graph import LLM
from xcore.batching import BlockPool, Ledger, Sequence, Step
from xcore.batching.step import StagePhase
from xcore.orders import fcfs
from xcore.policies import sharing
from xcore.policies.one_phase import OnePhasePolicy
from xmulti.applications.orders import ApplicationOrder, WaitingCall
from xmulti.applications.warm_cache import WarmCache
from xmulti.sharing.iteration_cost import IterationCost
from xmulti.sharing.simulated_unit import SimulatedUnit
from xmulti.sharing.tenant import SimulatedTenant
from xsimulator.replay.cells import Ran


@dataclass(frozen=True)
class LLMLimits:
    """The limits of an LLM and its speed."""

    rates: ServiceRates = field(default_factory=ServiceRates)
    """Prompts are prefilled one after the other while nothing decodes; a decoding iteration takes the same time for
    every batch.
    """
    batch: int = 256
    kv_tokens: int = 42_900
    """Tokens of the KV cache; each request reserves its prompt and its whole output."""
    kv_bytes_per_token: int = 524_288
    cost: IterationCost | None = None
    """Seconds of iterations; None: those of `rates`, which don't depend on the batch."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CallLimits(OnePhasePolicy):
    """Selects the waiting calls whose prompts are prefilled next."""

    order: ApplicationOrder
    cache: WarmCache | None
    waiting: list[WaitingCall]
    """Calls with requests that wait."""

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """Return a step of the first calls' prompts, or one more token for all running sequences."""
        if phase != "encode":
            return super().next_step(ledger, now, phase)
        admitted = ledger.admit_these(self._first(ledger, now), now)
        self.waiting[:] = [call for call in self.waiting if call.requests]
        return Step(tuple((sequence, sequence.to_prefill) for sequence in admitted)) if admitted else None

    def _first(self, ledger: Ledger, now: float) -> list[Sequence]:
        """Return requests to start: in order, until one doesn't fit.

        A call whose adapter or context is being loaded keeps places for its requests; a call without a free adapter
        slot doesn't block later calls.
        """
        first: list[Sequence] = []
        places, blocks = self.max_num_seqs - ledger.residents, ledger.pool.available
        if not self.waiting or (not places and self.cache is None):
            return first
        ordered = sorted(self.waiting, key=lambda call: (self.order.key(call, now),))
        if self.cache:
            self.cache.prefetch(ordered, now)
        for call in ordered:
            each = max(1, ledger.most_blocks(call.requests[0]))
            requests = min(len(call.requests), places, blocks // each)
            if requests <= 0:
                break
            loaded = self.cache is None or self.cache.take(call, now)
            if loaded or call.loaded_s is not None:
                places, blocks = places - requests, blocks - requests * each
            if loaded:
                first += call.begin(requests)
                if call.requests:
                    break
        return first


class IterationTurns:
    """The rule of a single model: prompts that can start do so after every event. A `Sharing`.

    They never start twice without a decoding iteration in between.
    """

    def __init__(self) -> None:
        self._prefilled = self._asked = False
        """Whether prompts ran last, and whether an event has occurred since."""

    def start(self, unit: sharing.Unit[sharing.TenantT], now: float) -> None:
        """Start prompts, or else decoding."""
        (tenant,) = unit.tenants
        if unit.running:
            self._asked = self._prefilled
            return
        if not (self._prefilled and tenant.can_decode(now)):
            unit.prefill(tenant)
            self._prefilled = bool(unit.running)
        if not unit.running and tenant.can_decode(now):
            unit.decode(tenant, 1 if self._asked else None)
            self._prefilled = self._asked = False


Happened = Callable[[WaitingCall, float], None]
"""Callback for a call's progress, with the time in seconds."""


class LLMBackend(SimulatedUnit):
    """The LLM's simulation: requests keep their place in the batch until they end.

    Free places are assigned after every event.
    """

    def __init__(
        self, limits: LLMLimits, order: ApplicationOrder, cache: WarmCache | None, begun: Happened, ended: Happened
    ):
        """Set up the backend with its callbacks.

        `begun` is called when a call's first prompts have been computed, `ended` when its last token has been
        generated.
        """
        self._begun, self._ended = begun, ended
        self._calls: dict[int, WaitingCall] = {}
        """By the index of each request that hasn't ended."""
        self._indices = count()
        self._limits = CallLimits(limits.batch, order=order, cache=cache, waiting=[])
        self.ledger = Ledger(BlockPool(limits.kv_tokens, 1), fcfs)
        self._tenant = SimulatedTenant(LLM, self.ledger, limits.cost or limits.rates, self._limits, self)
        super().__init__([self._tenant], IterationTurns())

    @property
    def done(self) -> int:
        """Decoding iterations so far, including those of the running row."""
        job = self._tenant.job
        return self.ledger.iterations + (len(job.ends) if job and job.phase == "decode" else 0)

    def enqueue(self, call: WaitingCall) -> None:
        """Add a call's requests to the queue.

        Each generates one token more than the call requests: its prefill's token.
        """
        each = call.progress.call
        for index in islice(self._indices, each.parallel):
            self._calls[index] = call
            call.requests.append(Sequence(index, each.input_tokens, each.output_tokens + 1, call.arrival_s))
            self.submit(self._tenant, call.requests[-1])
        self._limits.waiting.append(call)

    def start(self, step: Step, now: float) -> None:
        """Implement the tenant's recording interface: prompts were counted at their admission."""

    def book(self, step: Step, ran: Ran, finished: Iterable[Sequence]) -> None:
        """Implement the tenant's recording interface: prompts have been computed, or last tokens generated."""
        for call in dict.fromkeys(self._calls[sequence.index] for sequence, _ in step.encode):
            if not call.begun:
                call.begun = True
                self._begun(call, ran.next_s)
        ended = [call for sequence in finished if (call := self._calls.pop(sequence.index)).end()]
        for call in sorted(ended, key=lambda call: call.index):
            self._ended(call, ran.next_s)
