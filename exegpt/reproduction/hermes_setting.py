"""The setting of Hermes' evaluation: the LLM, its loads, and the orders that are compared."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from xcore.applications.demand import ApplicationDemand, ServiceRates
from xcore.arrays import Array
from xmulti.applications.application_progress import DemandEstimates
from xmulti.applications.llm_backend import LLMLimits
from xmulti.applications.orders import ApplicationOrder, LowestMean, Oracle, application_gittins
from xmulti.applications.simulation import simulate
from xmulti.applications.submission import Submission

RATES, LIMITS = ServiceRates(), LLMLimits()
APPLICATIONS = 300
ENGINES = {"256 at once": LIMITS, "8 at once": replace(LIMITS, batch=8)}
"""The limits of the LLM: as many requests as fit into the cache (some 30), or so few that 1x saturates them.

8 tokens in 60 ms are 133 per second, about the load's demand. The paper doesn't name its limit, but its queues are long
at 1x.
"""
LOADS = {"1x": 30.0, "2x": 15.0, "3x": 10.0}
"""Minutes within which all applications are submitted."""

Models = dict[str, ApplicationDemand]


def completion_seconds(
    workloads: Iterable[Sequence[Submission]],
    order: Callable[[], ApplicationOrder],
    estimates: DemandEstimates | None,
    limits: LLMLimits,
) -> Array:
    """Return the completion times of all workloads."""
    return np.concatenate([simulate(each, order(), limits, estimates).completion_s for each in workloads])


def ablated(workloads: Sequence[Sequence[Submission]], models: Models, limits: LLMLimits) -> dict[str, Array]:
    """Return the completion times of all workloads without parts of Hermes, and by true demands."""
    refined, prior = DemandEstimates(models), DemandEstimates(models, refine=False)
    return {
        "Hermes": completion_seconds(workloads, application_gittins, refined, limits),
        "no refinement": completion_seconds(workloads, application_gittins, prior, limits),
        "nor Gittins": completion_seconds(workloads, LowestMean, prior, limits),
        "oracle": completion_seconds(workloads, lambda: Oracle(limits.rates), None, limits),
    }
