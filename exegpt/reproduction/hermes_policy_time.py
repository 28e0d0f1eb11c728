"""The time of Hermes' policy (Figure 15a): how long ordering the waiting calls takes, by the rate of applications."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace

from exegpt.reproduction.hermes_setting import APPLICATIONS, ENGINES, RATES, Models
from exegpt.reproduction.hermes_workload import draw_submissions
from xcore.applications.demand_graph import DemandGraph
from xmulti.applications.application_progress import Account, DemandEstimates, SubmissionProgress
from xmulti.applications.orders import ApplicationOrder, WaitingCall, application_gittins
from xmulti.applications.simulation import simulate

MINUTES = (60.0, 30.0, 15.0, 10.0, 5.0)
"""Minutes within which all applications are submitted: half to six times the rate of 1x."""


@dataclass(frozen=True)
class PolicyTime:
    """The policy's time at one rate."""

    rate_per_minute: float
    waiting: float
    """Mean number of ordered calls of a decision."""
    ms: float
    """Median time to order so many."""


class Counting:
    """An order that counts its keys, and the times at which it was asked for them."""

    def __init__(self, order: ApplicationOrder):
        self._order = order
        self.keys = 0
        self.times: set[float] = set()

    def key(self, job: WaitingCall, now: float) -> object:
        """Return the call's key."""
        self.keys += 1
        self.times.add(now)
        return self._order.key(job, now)


def policy_times(
    graphs: Sequence[DemandGraph], models: Models, seed: int, minutes: Sequence[float] = MINUTES
) -> tuple[PolicyTime, ...]:
    """Return the policy's time at each rate, with 8 requests at once."""
    rows = []
    for window in minutes:
        order = Counting(application_gittins())
        workload = draw_submissions(graphs, APPLICATIONS, window * 60, seed)
        simulate(workload, order, ENGINES["8 at once"], DemandEstimates(models))
        waiting = order.keys / max(1, len(order.times))
        rows.append(PolicyTime(APPLICATIONS / window, waiting, decision_ms(models, max(1, round(waiting)))))
    return tuple(rows)


def decision_ms(models: Models, applications: int = 300, decisions: int = 50) -> float:
    """Time the ordering of waiting applications; each attains a token of service between two decisions."""
    counter, estimates, order = SimpleNamespace(done=0), DemandEstimates(models), application_gittins()
    submissions = draw_submissions([model.graph for model in models.values()], applications, 60.0, 0)
    waiting = []
    for each in submissions:
        progress = SubmissionProgress(each, RATES, counter, Account(counter))
        estimates.update(progress)
        progress.begin(1)
        waiting.append(WaitingCall(progress, each.arrival_s, each.index))
    seconds = []
    for _ in range(decisions):
        counter.done += 1
        began = time.perf_counter()
        sorted(waiting, key=lambda call: order.key(call, 0.0))
        seconds.append(time.perf_counter() - began)
    return 1e3 * median(seconds)
