"""Searching again while a run goes on, for the lengths that its requests turn out to have."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exegpt.cli.inputs import Setting
    from exegpt.schedule import Schedule
    from exegpt.workload import Workload
    from xrunner.adaptation import Reschedule

WAA = ("waa-c", "waa-m")


def rescheduling(setting: "Setting", given: "Schedule") -> "Reschedule":
    """A search like the one for the given schedule: the same policy, bound and replicas.

    WAA's sides are dealt anew. Every other policy keeps its stages and its cache, and so takes over in place.
    """
    from exegpt.cli.answer import search_schedule

    bound_s = math.inf if given.latency_bound_s is None else given.latency_bound_s
    fixed = {"replicas": given.replicas}
    if given.policy not in WAA:
        fixed |= {"tp_degree": given.tp_degree or 1, "tp_gpus": given.tp_gpus or 0} if given.tp_gpus else {}

    def reschedule(workload: "Workload") -> "Schedule | None":
        apart = given.policy in WAA
        answer = search_schedule(
            replace(setting, workload=workload),
            bound_s,
            bound=given.bound,
            policies=WAA if apart else (given.policy,),
            fixed=fixed,
        )
        found = answer.schedule
        if found is None or apart:
            return found
        return replace(found, stages=given.stages, kv_blocks=given.kv_blocks)

    return reschedule
