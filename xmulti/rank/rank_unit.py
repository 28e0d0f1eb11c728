"""Devices that several models share on ranks.

Each model has its own engine, with a part of all its layers on every device.
The rule of sharing (`xcore/policies/sharing.py`) decides what runs next. The event simulator follows it too
(`xmulti/sharing/simulated_unit.py`).
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from xcore.batching import Ledger
from xcore.batching import Sequence as LedgerSequence
from xcore.batching.shared_pool import least_quota
from xcore.batching.step import StagePhase
from xcore.policies.one_phase import OnePhasePolicy
from xcore.policies.priority_sharing import PrioritySharing
from xcore.policies.quota_adaptation import QuotaAdaptation
from xcore.policies.sharing import Sharing, SpatialSharing, TimeSharing
from xcore.requests.engine_protocol import Event
from xcore.requests.request import Request
from xcore.specs.cluster_plan import PlannedModel, Share
from xrunner.comm.ranks import Ranks
from xrunner.comm.transport import wait
from xrunner.core.driver import Options
from xrunner.core.engine import Engine
from xrunner.core.shared_cache import shared_caches
from xrunner.models.device import CPU
from xrunner.rank.warm_up import Extent
from xrunner.rank.worker import serve

_NAP_S = 2e-3
"""Seconds between two checks while nothing can run although there are requests."""


@dataclass(eq=False)
class RankJob:
    """A model's iteration, on a share of the devices."""

    tenant: "RankTenant"
    phase: StagePhase
    share: float
    start_s: float

    def cut(self, now: float) -> None:
        """Do nothing: a row of one iteration ends without a cut."""


@dataclass(eq=False)
class RankTenant:
    """One model's engine, as the rule of sharing sees it."""

    name: str
    engine: Engine
    limits: OnePhasePolicy
    streams: Mapping[StagePhase, torch.cuda.Stream] = field(default_factory=dict)
    """The stream of each phase, if it isn't the device's default stream."""
    least: int | None = None
    """Blocks that its quota keeps while quotas follow their use; None: its quota is fixed."""
    job: RankJob | None = None
    """Its current job."""
    idle_since_s: float = 0.0
    """When its last job ended."""
    busy_s: float = 0.0
    """Seconds of its jobs so far."""

    def on(self, phase: StagePhase) -> AbstractContextManager[object]:
        """Return a context in which this thread's work is queued on the phase's stream."""
        return torch.cuda.stream(self.streams[phase]) if self.streams else nullcontext()

    @property
    def ledger(self) -> Ledger:
        """The ledger of the model's requests."""
        return self.engine.ledger

    @property
    def ahead(self) -> int:
        """Blocks that the job will allocate at its end: none, since one iteration has its blocks from the start."""
        return 0

    def first(self, now: float) -> LedgerSequence | None:
        """Return the waiting prompt that is admitted next, if its blocks are free."""
        return self.limits.first(self.ledger, now)

    def can_prefill(self, now: float) -> bool:
        """Return whether a prompt would be admitted now."""
        return self.limits.can_prefill(self.ledger, now)

    def can_decode(self, now: float) -> bool:
        """Return whether the model has sequences to decode."""
        return bool(self.ledger.decoding)


class RankUnit:
    """Models on the same devices, with one rank per device, whose jobs run by a rule of sharing.

    Jobs run one at a time, or at the same time with `SpatialSharing`, over tenants with separate streams on one GPU.
    The first rank leads: after `open` it decides, and the other ranks `serve`.
    """

    def __init__(self, tenants: Sequence[RankTenant], sharing: Sharing):
        self.tenants, self._sharing = tenants, sharing
        self._beside = isinstance(sharing, SpatialSharing)
        self.running: list[RankJob] = []
        """Jobs in progress. With one at a time, the last job run: on a GPU the next is queued behind it."""
        self._by_name = {tenant.name: tenant for tenant in tenants}
        self._quotas = QuotaAdaptation({})

    @staticmethod
    def load(
        models: Sequence[PlannedModel],
        directories: Mapping[str, Path],
        ranks: Ranks | None = None,
        device: torch.device = CPU,
        attention: str = "triton",
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> "RankUnit":
        """Load this rank's part of the unit of models that share devices; all ranks call it alike.

        Each model has one stage. `directories` has the weights' directory by model name. With `streams`, models decode
        at the same time, each in its stream on its share of one GPU's multiprocessors. Without streams, one job runs at
        a time.

        Raises:
            InputError: A model can't be loaded.
        """
        assert all(len(m.schedule.stages) * m.schedule.replicas == 1 for m in models), "all devices are one stage"
        ranks = ranks or Ranks()
        share = models[0].share
        assert share, "models of a unit share their devices"
        shared = shared_caches([model.schedule for model in models], share.pool, ranks, device)
        tenants = []
        for place, (model, cache) in enumerate(zip(models, shared, strict=True)):
            engine = Engine.load(
                directories[model.name],
                model.schedule,
                ranks.apart(),
                device=device,
                attention=attention,
                shared=cache,
            )
            own: dict[StagePhase, torch.cuda.Stream] = {}
            if streams:
                own = {"encode": torch.cuda.Stream(device), "decode": streams[place]}
            limits = OnePhasePolicy.of(model.schedule, model.share.decode if model.share else 1.0)
            least = least_quota(model.schedule) if share.pool == "quotas" else None
            tenants.append(RankTenant(model.name, engine, limits, own, least))
        return RankUnit(tenants, _rule(share, beside=bool(streams)))

    def open(self, extents: Mapping[str, Extent] | None = None, options: Mapping[str, Options] | None = None) -> None:
        """Prepare for requests of each model within an extent; without one, for all that its schedule allows.

        All ranks call it alike. `options` has the options of each model; a rule by priority needs the order in its
        options.
        """
        for tenant in self.tenants:
            schedule = tenant.engine.schedule
            within = extents or {tenant.name: Extent.unlimited(schedule)}
            how = replace(options[tenant.name] if options else Options(), policy=tenant.limits)
            with tenant.on("decode"):  # graphs of decoding are captured
                tenant.engine.open(within[tenant.name], how)
        if any(
            tenant.streams for tenant in self.tenants
        ):  # torch keeps memory per stream: free prompts' buffers for others
            torch.cuda.empty_cache()
        for tenant in self.tenants:  # one clock, which begins when all are ready
            tenant.engine.count_from(self.tenants[-1].engine.began)
        if self.leads:
            self._quotas = QuotaAdaptation({t: t.least for t in self.tenants if t.least is not None})

    @property
    def leads(self) -> bool:
        """Whether this rank gets the requests and decides what runs."""
        return all(tenant.engine.leads for tenant in self.tenants)

    def serve(self) -> None:
        """Execute the first rank's decisions, until it drains the unit; on all other ranks."""
        serve(*(tenant.engine.worker for tenant in self.tenants))

    @property
    def now(self) -> float:
        """Seconds since the unit was opened."""
        return self.tenants[0].engine.worker.now()

    @property
    def zero_s(self) -> float:
        """When the unit was opened, by this machine's monotonic clock."""
        return time.monotonic() - self.now

    @property
    def used(self) -> float:
        """The sum of the running jobs' shares."""
        return sum(job.share for job in self.running)

    @property
    def idle(self) -> bool:
        """Whether all requests have ended."""
        return all(tenant.engine.idle for tenant in self.tenants)

    def add(self, name: str, request: Request) -> None:
        """Add a model's request, which waits from now on or from its later arrival.

        Raises:
            InputError: As of `Engine.add`.
        """
        arrival_s = max(request.arrival_s, self.now)
        self._by_name[name].engine.add(replace(request, arrival_s=arrival_s))

    def step(self) -> bool:
        """Run the jobs that the rule chooses. Return whether there were any."""
        self._update()
        before = len(self.running)
        self._sharing.start(self, self.now)
        return len(self.running) > before

    def wait(self) -> None:
        """Wait after a step without work: for a short time, or until a job is done."""
        jobs, until = len(self.running), self.now + _NAP_S

        def over() -> bool:
            self._update()
            return len(self.running) < jobs or self.now >= until

        if jobs:
            wait(over)
        else:
            time.sleep(_NAP_S)

    def take(self, name: str) -> list[Event]:
        """Return the new events of a model's requests since the last call."""
        return self._by_name[name].engine.take()

    def prefill(self, tenant: RankTenant) -> None:
        """Run a model's prompts."""
        self._run(tenant, "encode", tenant.limits.prefill_share)

    def decode(self, tenant: RankTenant, most: int | None = None) -> None:
        """Run one decoding iteration of a model, unless all its sequences have been preempted."""
        self._run(tenant, "decode", tenant.limits.decode_share)

    def _run(self, tenant: RankTenant, phase: StagePhase, share: float) -> None:
        began = self.now
        with tenant.on(phase):
            ran = tenant.engine.run_phase(phase)
        if ran:
            tenant.job = RankJob(tenant, phase, share, began)
            self.running.append(tenant.job)
            if not self._beside:
                self._end(tenant.job)

    def _update(self) -> None:
        """Process all arrivals, and end the jobs that are done."""
        for tenant in self.tenants:
            tenant.engine.update()
        for job in self.running:
            if job.tenant.job and not job.tenant.engine.computing:
                self._end(job)
        self.running = [job for job in self.running if job.tenant.job]

    def _end(self, job: RankJob) -> None:
        job.tenant.job, job.tenant.idle_since_s = None, self.now
        job.tenant.busy_s += self.now - job.start_s
        if job.phase == "decode":
            self._quotas.decoded(job.tenant, 1, self.now)

    def drain(self) -> None:
        """Run all requests to completion, and release the other ranks; on the first rank."""
        while self._beside and self.running:  # streams don't wait for each other
            self.wait()
        for tenant in self.tenants:
            with tenant.on("decode"):
                tenant.engine.drain()

    def close(self) -> None:
        """Free the memory; all ranks call it, once the unit is drained."""
        for tenant in self.tenants:  # in one order on all ranks, which wait for each other
            tenant.engine.close()


def _rule(share: Share, beside: bool) -> Sharing:
    """Return the rule by which models share devices: at the same time, or one job at a time."""
    if beside:
        return SpatialSharing()
    if share.by == "priority":
        return PrioritySharing(prompts_first=True)
    return TimeSharing(in_order=share.pool == "merged")
