"""Popularity: detects request rates that have drifted from those of the plan.

1. Each model's arrivals are tested against its rate (`rate_drift.py`). A day of Poisson arrivals at the planned rates
   raises a false alarm with a probability of at most `FALSE_ALARMS`, over all models together.
2. An alarm has to be confirmed. From the alarm on, all models' requests are counted for `lasts_s`, or until twice
   `ENOUGH` have arrived or were planned to arrive. With fewer than `ENOUGH` requests the test starts again. Otherwise
   popularity has drifted if the model's rate is beyond the tolerance in most parts of this time. A burst, which isn't
   Poisson, raises an alarm too, but is in few parts. The rates measured in this time are those to plan for.
"""

import itertools
import statistics
from collections.abc import Mapping

from xmulti.serving.rate_drift import TOLERATED, RateDrift

FALSE_ALARMS = 0.01
"""Probability of an alarm within a day at the planned rates; it costs a useless search of some CPU minutes."""
DAY_S = 86400.0
ENOUGH = 50
"""Minimum requests to all models together; their number then has a standard deviation of a seventh."""
PARTS = 5
"""Parts of the confirmation time; the median of their rates counts."""


class Popularity:
    """The test of all models' request rates.

    `planned` are the models' planned rates in sequences per second. Times are of the monotonic clock, in seconds;
    nothing is counted before `begin_s`.
    """

    def __init__(self, planned: Mapping[str, float], lasts_s: float, begin_s: float):
        self._lasts_s = lasts_s
        self.restart(planned, begin_s)

    def restart(self, planned: Mapping[str, float], begin_s: float) -> None:
        """Test against these rates, from `begin_s` on."""
        self.planned, self._begin_s = dict(planned), begin_s
        self._last_s: float | None = None
        """When arrivals were last reported; None: not since `begin_s`."""
        self._tests = {name: RateDrift(rate) for name, rate in self.planned.items()}
        self._alarm: tuple[str, str] | None = None
        """The model, and whether its rate is `higher` or `lower`."""
        self._since_s = begin_s
        """When that was raised."""
        self._counts = dict.fromkeys(self.planned, 0)
        """Requests of each model since then."""
        self._looks: list[tuple[int, float]] = []
        """Since then, for the alarm's model: requests, and seconds in which they arrived."""

    def pause(self, now_s: float) -> None:
        """Restart the test: requests were impossible until now."""
        self.restart(self.planned, max(now_s, self._begin_s))

    @property
    def threshold_s(self) -> float:
        """The threshold of a model's statistic: the false-alarm probabilities of all models' tests add up."""
        return len(self._tests) * DAY_S / FALSE_ALARMS

    def come(self, counts: Mapping[str, int], now_s: float) -> dict[str, float] | None:
        """Add each model's arrivals since the last call.

        Return the arrival rates if they have drifted; the test then restarts.
        """
        if now_s < self._begin_s:
            return None
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or now_s <= last_s:
            return None
        seconds = now_s - last_s
        if self._alarm is None:
            self._test(counts, seconds, now_s)
            return None
        for name, count in counts.items():
            self._counts[name] += count
        self._looks.append((counts[self._alarm[0]], seconds))
        lasted_s = now_s - self._since_s
        enough = max(lasted_s * sum(self.planned.values()), sum(self._counts.values())) >= 2 * ENOUGH
        if lasted_s < self._lasts_s or not enough:
            return None
        rates = {
            name: (count + 0.5) / lasted_s for name, count in self._counts.items()
        }  # without requests slightly above 0
        drifted = sum(self._counts.values()) >= ENOUGH and self._lasts()
        self.restart(self.planned, now_s)
        return rates if drifted else None

    def _test(self, counts: Mapping[str, int], seconds: float, now_s: float) -> None:
        for name, test in self._tests.items():
            test.come(counts[name], seconds)
            if test.statistic_s >= self.threshold_s:
                self._alarm, self._since_s = (name, test.side), now_s

    def _lasts(self) -> bool:
        """Return whether the alarm's model has had a rate beyond the tolerance for most of the time."""
        assert self._alarm, "an alarm"
        name, side = self._alarm
        number = len(self._looks)
        edges = [number * part // PARTS for part in range(PARTS + 1)]
        parts = [self._looks[begin:end] for begin, end in itertools.pairwise(edges) if begin < end]
        rate = statistics.median(sum(count for count, _ in part) / sum(s for _, s in part) for part in parts)
        times = rate / self.planned[name]
        return times > TOLERATED if side == "higher" else times < 1 / TOLERATED
