"""Unit: devices that several models share, each with an engine of its own and a part of all its layers on each of them.
What runs next is the rule of sharing (`exegpt/policies/sharing.py`), which the event simulator follows too
(`xsimulator/multimodel/unit.py`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from exegpt.batching import Ledger
from exegpt.batching import Sequence as LedgerSequence
from exegpt.models.device import CPU
from exegpt.plan import PlannedModel
from exegpt.policies.one_phase import OnePhasePolicy
from exegpt.policies.priority_sharing import PrioritySharing
from exegpt.policies.sharing import Sharing, TimeSharing
from exegpt.request import Request
from exegpt.schedule import StagePhase
from xrunner.comm.ranks import Ranks
from xrunner.core.driver import Options
from xrunner.core.engine import Engine
from xrunner.core.events import Event
from xrunner.core.shared_cache import SharedCache, merged_caches
from xrunner.rank.warm_up import Extent
from xrunner.rank.worker import serve

_NAP_S = 2e-3
"""Between two looks of a unit that has nothing to run though it has requests."""


@dataclass(eq=False)
class Tenant:
    """One model's engine, as the rule of sharing sees it."""

    name: str
    engine: Engine
    policy: OnePhasePolicy
    idle_since_s: float = 0.0
    """When its last job ended."""
    busy_s: float = 0.0
    """Seconds of its jobs so far."""

    job = None
    """A job is done when the rule looks again."""

    @property
    def limits(self) -> OnePhasePolicy:
        """Without shares: one job has the whole device."""
        return self.policy

    @property
    def ledger(self) -> Ledger:
        """Its requests."""
        return self.engine.ledger

    def first(self, now: float) -> LedgerSequence | None:
        """The waiting prompt that is admitted next, if its blocks are free."""
        return self.policy.first(self.ledger, now)

    def can_prefill(self, now: float) -> bool:
        """Whether it would be admitted now."""
        return self.policy.can_prefill(self.ledger, now)

    def can_decode(self, now: float) -> bool:
        """Whether it has sequences to decode."""
        return bool(self.ledger.decoding)


class Unit:
    """Models on the same devices, a rank for each: one job at a time, by a rule. The first rank leads: after `open` it
    decides, and the others `serve`.
    """

    def __init__(self, tenants: Sequence[Tenant], sharing: Sharing):
        self.tenants, self._sharing = tenants, sharing
        self.running: list[Tenant] = []
        """Whose job the rule has just run."""
        self._by_name = {tenant.name: tenant for tenant in tenants}

    @staticmethod
    def load(
        models: Sequence[PlannedModel],
        directories: Mapping[str, Path],
        ranks: Ranks | None = None,
        device: torch.device = CPU,
        attention: str = "triton",
    ) -> "Unit":
        """This rank's part of the unit of models that share devices, with their weights, by the models' names; all
        ranks call it alike. Each has one stage. InputError for what can't be loaded.
        """
        assert all(len(m.schedule.stages) * m.schedule.replicas == 1 for m in models), "all devices are one stage"
        ranks = ranks or Ranks()
        shared: list[SharedCache | None] = [None] * len(models)
        share = models[0].share
        assert share, "models of a unit share their devices"
        if share.pool == "merged":
            shared = [*merged_caches([model.schedule for model in models], ranks, device)]
        tenants = []
        for model, cache in zip(models, shared, strict=True):
            engine = Engine.load(
                directories[model.name],
                model.schedule,
                ranks.apart(),
                device=device,
                attention=attention,
                shared=cache,
            )
            tenants.append(Tenant(model.name, engine, OnePhasePolicy.of(model.schedule)))
        in_order = TimeSharing(in_order=share.pool == "merged")
        return Unit(tenants, PrioritySharing(prompts_first=True) if share.by == "priority" else in_order)

    def open(self, extents: Mapping[str, Extent] | None = None, options: Mapping[str, Options] | None = None) -> None:
        """Be ready for requests of each model within an extent; without one, for all that its schedule allows. All
        ranks call it alike. `options` are each model's: under a rule by priority with its order.
        """
        for tenant in self.tenants:
            schedule = tenant.engine.schedule
            within = extents or {tenant.name: Extent.within(schedule, schedule.model.spec.context - 1, 1)}
            how = replace(options[tenant.name] if options else Options(), policy=tenant.policy)
            tenant.engine.open(within[tenant.name], how)
        for tenant in self.tenants:  # one clock, which begins when all are ready
            tenant.engine.count_from(self.tenants[-1].engine.began)

    @property
    def leads(self) -> bool:
        """Whether this rank gets the requests and decides what runs."""
        return all(tenant.engine.leads for tenant in self.tenants)

    def serve(self) -> None:
        """Do what the first rank decides, until it drains the unit; on all others."""
        serve(*(tenant.engine.worker for tenant in self.tenants))

    @property
    def now(self) -> float:
        """Seconds since it was opened."""
        return self.tenants[0].engine.worker.now()

    @property
    def zero_s(self) -> float:
        """When it was opened, by this machine's monotonic clock."""
        return time.monotonic() - self.now

    @property
    def used(self) -> float:
        """The shares of the jobs that run, each of which has the whole device."""
        return float(len(self.running))

    @property
    def idle(self) -> bool:
        """Whether all requests have ended."""
        return all(tenant.engine.idle for tenant in self.tenants)

    def add(self, name: str, request: Request) -> None:
        """Let a model's request wait from now on, or from its later arrival; InputError as of `Engine.add`."""
        arrival_s = max(request.arrival_s, self.now)
        self._by_name[name].engine.add(replace(request, arrival_s=arrival_s))

    def step(self) -> bool:
        """Run the job that the rule chooses, if there is one; whether there was."""
        for tenant in self.tenants:
            tenant.engine.update()
        self.running = []
        self._sharing.start(self, self.now)
        return bool(self.running)

    def wait(self) -> None:
        """Rest, where a step had nothing to do."""
        time.sleep(_NAP_S)

    def take(self, name: str) -> list[Event]:
        """What has come of a model's requests since the last call."""
        return self._by_name[name].engine.take()

    def prefill(self, tenant: Tenant) -> None:
        """Run a model's prompts."""
        self._run(tenant, "encode")

    def decode(self, tenant: Tenant, most: int | None = None) -> None:
        """Run one decoding iteration of a model, unless all its sequences have been preempted."""
        self._run(tenant, "decode")

    def _run(self, tenant: Tenant, phase: StagePhase) -> None:
        began = self.now
        if tenant.engine.run_phase(phase):
            self.running.append(tenant)
            tenant.idle_since_s = self.now
            tenant.busy_s += tenant.idle_since_s - began

    def drain(self) -> None:
        """Run all requests to their ends, and let the other ranks go; on the first."""
        for tenant in self.tenants:
            tenant.engine.drain()

    def close(self) -> None:
        """Give the memory back; all ranks call it, once the unit is drained."""
        for tenant in self.tenants:  # in one order on all ranks, which wait for each other
            tenant.engine.close()
