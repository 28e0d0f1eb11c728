"""Replicas over a day: the fewest replicas of a schedule that sustain each rate of a load curve."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from xcore.specs.load_curve import LoadHour
from xcore.specs.schedule import Schedule, devices
from xscheduler.goodput import Meter
from xscheduler.open_search import COUNTS
from xscheduler.replica_layout import least

REQUESTS_AN_HOUR = COUNTS[1]
"""Requests with which a number of replicas is tested."""


@dataclass(frozen=True)
class HourlyReplicas:
    """The replicas of each row of a load curve."""

    curve: tuple[LoadHour, ...]
    replicas: tuple[int, ...]
    devices: int
    """Devices of one replica."""

    @property
    def hours(self) -> float:
        """The length of the curve."""
        return sum(hour.hours for hour in self.curve)

    @property
    def device_hours(self) -> float:
        """The sum of devices times hours."""
        pairs = zip(self.curve, self.replicas, strict=True)
        return sum(self.devices * replicas * hour.hours for hour, replicas in pairs)

    @property
    def requests(self) -> float:
        """The number of requests."""
        return sum(3600 * hour.hours * hour.rate_seq_s for hour in self.curve)


def hourly_replicas(
    meter: Meter,
    schedule: Schedule,
    goodput_seq_s: float,
    curve: Sequence[LoadHour],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> HourlyReplicas:
    """Return the fewest replicas for each row of the curve.

    Args:
        meter: Replays requests under the bounds.
        schedule: The schedule of the peak, whose replicas sustain all rates.
        goodput_seq_s: The rate that all its replicas sustain; each of fewer replicas sustains no larger part of it,
            because its arrivals are less regular.
        curve: The rates.
        progress: Is called with the numbers of answered rows and of all rows.
    """
    needed: dict[float, int] = {0.0: 0}
    for place, hour in enumerate(curve):
        progress(place, len(curve))
        if hour.rate_seq_s not in needed:
            needed[hour.rate_seq_s] = _fewest(meter, schedule, goodput_seq_s / schedule.replicas, hour.rate_seq_s)
    return HourlyReplicas(tuple(curve), tuple(needed[hour.rate_seq_s] for hour in curve), devices(schedule))


def _fewest(meter: Meter, schedule: Schedule, each: float, rate_seq_s: float) -> int:
    group = schedule.model.spec.attention_dp  # of replicas that share experts
    replicas = group * least(rate_seq_s, group * each)
    while replicas < schedule.replicas:
        if meter.sustains(replace(schedule, replicas=replicas), rate_seq_s, REQUESTS_AN_HOUR):
            return replicas
        replicas += group
    return schedule.replicas
