"""Devices that several models share in simulated time, and the jobs on them from one event to the next.

Events are the ends of jobs and the arrivals of requests. At each event the rule of sharing starts what it can. Rows of
decoding iterations are simulated at once and cut if the rule must decide before their end.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf

from xcore.batching import Sequence
from xcore.policies.quota_adaptation import QuotaAdaptation
from xcore.policies.sharing import Sharing
from xcore.specs.timeline import Span
from xmulti.sharing.tenant import SimulatedJob, SimulatedTenant


@dataclass(eq=False)
class SimulatedUnit:
    """Models on shared devices in simulated time. An `Actor`."""

    tenants: Items[SimulatedTenant]
    sharing: Sharing
    contention: float = 1.0
    """Factor by which an iteration takes longer if it begins while another job runs."""
    overhead: float = 1.0
    """Factor by which all iterations take longer because models share: their caches' tables, the switch of model."""
    first_device: int = 0
    spans: list[Span] | None = None
    """Spans of the jobs; None: they aren't kept."""
    step_by_step: bool = False
    """Whether every iteration is simulated alone: the same result, slower."""
    running: list[SimulatedJob] = field(default_factory=list)
    now: float = 0.0
    _last: SimulatedTenant | None = field(default=None, init=False)
    """The model whose job began last."""
    _settled: bool = field(default=False, init=False)
    """Whether the rule of sharing has started what can start now."""
    _quotas: QuotaAdaptation = field(init=False)

    def __post_init__(self) -> None:
        self._quotas = QuotaAdaptation({t: t.least for t in self.tenants if t.least is not None})

    @property
    def used(self) -> float:
        """The sum of the running jobs' shares."""
        return sum(job.share for job in self.running)

    @property
    def idle(self) -> bool:
        """Whether no model has a request."""
        return all(tenant.ledger.idle for tenant in self.tenants)

    def next_event(self) -> float:
        """Return when jobs start or end, or a request arrives."""
        if not self._settled:
            return self.now
        ends = min([job.end_s for job in self.running], default=inf)
        return min([ends, *[self._arrival(tenant) for tenant in self.tenants]])

    def act(self, now: float) -> None:
        """Start the jobs that can start now; or advance to the next event, and end the jobs that end then."""
        if not self._settled:
            self._settled = True
            self.sharing.start(self, now)
            return
        self.now, self._settled = now, False
        self._end_jobs()

    def submit(self, tenant: SimulatedTenant, sequence: Sequence) -> None:
        """Submit a request of one of the models; it must not arrive before the last event."""
        tenant.ledger.submit([sequence])
        if sequence.arrival_s <= self.now:
            self._settled = False

    def interrupt(self, now: float) -> None:
        """End rows after their running iterations, and let the sharing rule decide again, after an event."""
        for job in self.running:
            job.cut(now)
        self.now, self._settled = now, False

    def close(self, now: float) -> None:
        """End at `now`, when all running jobs are done, and start no others."""
        self.now = now
        self._end_jobs()
        assert not self.running, "all jobs have ended"

    def prefill(self, tenant: SimulatedTenant) -> None:
        """Start a model's prompts, unless none can be admitted."""
        job = tenant.prefill(self.now, self._slowdown(), self._switches(tenant))
        if job:
            self._begin(job)

    def decode(self, tenant: SimulatedTenant, most: int | None = None) -> None:
        """Start a model's decoding, unless all of its sequences have been preempted."""
        limit = {"most": 1} if self.step_by_step else {} if most is None else {"most": most}
        job = tenant.decode(self.now, self._slowdown(), self._switches(tenant), **limit)
        if job:
            self._begin(job)

    def _slowdown(self) -> float:
        return self.overhead * (self.contention if self.running else 1.0)

    def _switches(self, tenant: SimulatedTenant) -> bool:
        """Return whether another model's job began last."""
        return self._last is not None and self._last is not tenant

    def _begin(self, job: SimulatedJob) -> None:
        self._last = job.tenant
        if len(self.running) == 1 and self.contention != 1:  # it ran alone, and its next iteration does not
            self.running[0].cut(self.now)
        self.running.append(job)

    def _arrival(self, tenant: SimulatedTenant) -> float:
        if tenant.resumes_s > self.now:
            return tenant.resumes_s
        arrival = tenant.ledger.waiting.next_arrival(self.now)
        return inf if arrival is None else arrival

    def _end_jobs(self) -> None:
        over = [job for job in self.running if job.end_s <= self.now]
        if not over:
            return
        self.running = [job for job in self.running if job.end_s > self.now]
        for job in over:
            if job.phase == "decode":
                self._quotas.decoded(job.tenant, len(job.ends), self.now)
            job.tenant.finish()
            if self.spans is not None:
                self._keep(job)
        if len(self.running) == 1 and self.contention != 1:
            self.running[0].cut(self.now)

    def _keep(self, job: SimulatedJob) -> None:
        assert self.spans is not None
        stage = self.tenants.index(job.tenant)
        sequences = len(job.step.encode) + len(job.step.decode)
        tokens = job.step.tokens * len(job.ends)
        self.spans.append(Span(self.first_device, stage, job.phase, 0, job.start_s, job.end_s, sequences, tokens))
