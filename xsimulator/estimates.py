"""The one door: a schedule's steady-state Estimate and the Timeline of a typical period, whatever its policy."""

from dataclasses import replace

from exegpt.errors import InputError
from exegpt.estimate import Estimate
from exegpt.profile import Profile
from exegpt.schedule import Schedule
from exegpt.timeline import Timeline
from exegpt.workload import Workload
from xsimulator.policies import chunked, orca, rra, static
from xsimulator.replay import replay
from xsimulator.scenario import Scenario
from xsimulator.steady_state import Form


def estimate(
    schedule: Schedule,
    profile: Profile,
    workload: Workload | None = None,
    *,
    steady_state: Form = "exact",
    variation: bool = True,
) -> Estimate:
    """What a schedule gives in its steady state, under its own workload or another.

    `steady_state="paper"` counts as the paper does; `variation` allows for the varying time of encoding in latencies.
    """
    return evaluate(Scenario.of(schedule, profile, workload, steady_state, variation), schedule)


def evaluate(scenario: Scenario, schedule: Schedule) -> Estimate:
    """The Estimate of a schedule's control variables in a scenario."""
    match schedule.policy:
        case "rra":
            return rra.estimate(scenario, schedule.encode_batch or 0, schedule.decode_iterations or 0)
        case "static":
            return static.estimate(scenario, schedule.encode_batch or 0)
        case "orca":
            return orca.estimate(scenario, schedule.max_num_seqs or 0, schedule.prefills_per_step or 0)
        case "chunked":
            return chunked.estimate(scenario, schedule.max_num_seqs or 0, schedule.max_num_batched_tokens or 0)
    raise InputError(f"Policy '{schedule.policy}' can't be simulated yet: static, orca, chunked and rra can.")


def timeline(schedule: Schedule, profile: Profile, workload: Workload | None = None, requests: int = 64) -> Timeline:
    """A simulated run of `requests` requests drawn from the workload, all there from the start."""
    load = workload or schedule.workload
    drawn = [replace(r, arrival_s=0.0) for r in load.draw(requests, context=schedule.model.spec.context)]
    return replay(schedule, profile, drawn).timeline
