"""Scenario: everything that a steady state depends on, except the control variables."""

from dataclasses import dataclass, replace

from xcore.specs.bound import ALL_REQUESTS, BoundMeaning
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.steady.load import Load
from xsimulator.steady.residents import Form


@dataclass(frozen=True, eq=False)
class Scenario:
    """Replicas of some stages under a load, and the bound on their latency."""

    replica: ReplicaCost
    load: Load
    bound: BoundMeaning = ALL_REQUESTS
    variation: bool = True
    """Whether latencies allow for the variation of encoding times."""
    replicas: int = 1
    adjust: float | None = None
    """Share of `Schedule.adjust`."""

    @staticmethod
    def of(schedule: Schedule, profile: Profile, workload: Workload | None, form: Form, variation: bool) -> "Scenario":
        """Return the scenario of a schedule, under its own workload or under `workload`."""
        replica = ReplicaCost.of(schedule, profile)
        counted = workload or schedule.workload
        load = Load.of(counted, replica.encoder_decoder, form, schedule.prefix_caching, schedule.speculation)
        return Scenario(replica, load, schedule.meaning, variation, schedule.replicas, schedule.adjust)

    @property
    def front_end_s(self) -> float:
        """Return the seconds that each request spends outside the engine."""
        return self.replica.cost_model.profile.front_end_s

    @property
    def idle_iterations(self) -> int:
        """Return the iterations between a sequence's last one and the first one of the next sequence in its slot.

        These iterations were decided before the sequence had ended.
        """
        return self.replica.cost_model.profile.in_flight - 1

    def watched(self) -> "Scenario":
        """Return a copy that records which tables it queries outside the profile's grid."""
        return replace(self, replica=self.replica.watched())
