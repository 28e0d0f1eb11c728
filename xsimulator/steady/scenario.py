"""Scenario: everything about a steady state but the control variables."""

from dataclasses import dataclass, replace

from xcore.specs.bound import ALL_REQUESTS, BoundMeaning
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload
from xsimulator.cost.replica import ReplicaCost
from xsimulator.steady.load import Load
from xsimulator.steady.residents import Form


@dataclass(frozen=True, eq=False)
class Scenario:
    """Replicas of some stages under a load, and what is asked of them."""

    replica: ReplicaCost
    load: Load
    bound: BoundMeaning = ALL_REQUESTS
    variation: bool = True
    """Whether latencies allow for the variation of encoding times."""
    replicas: int = 1

    @staticmethod
    def of(schedule: Schedule, profile: Profile, workload: Workload | None, form: Form, variation: bool) -> "Scenario":
        """The scenario that a schedule was made for, or its like under another workload."""
        replica = ReplicaCost.of(schedule, profile)
        load = Load(workload or schedule.workload, replica.encoder_decoder, form)
        return Scenario(replica, load, schedule.meaning, variation, schedule.replicas)

    @property
    def front_end_s(self) -> float:
        """Seconds of each request outside the engine."""
        return self.replica.cost_model.profile.front_end_s

    @property
    def idle_iterations(self) -> int:
        """Iterations between a sequence's last one and the first of the next in its slot: those that were decided
        before it had ended.
        """
        return self.replica.cost_model.profile.in_flight - 1

    def watched(self) -> "Scenario":
        """The same, which notes what it asks outside the profile's grid."""
        return replace(self, replica=self.replica.watched())
