"""The one door: a schedule's steady-state Estimate and the Timeline of a typical period, whatever its policy."""

from collections.abc import Mapping
from dataclasses import replace

from exegpt.errors import InputError
from exegpt.estimate import Estimate
from exegpt.profile import Profile
from exegpt.schedule import Schedule
from exegpt.timeline import Timeline
from exegpt.workload import Workload
from xsimulator.replay.event_simulator import replay
from xsimulator.steady import chunked, orca, rra, static, waa
from xsimulator.steady.outcome import Outcome, estimate_of
from xsimulator.steady.residents import Form
from xsimulator.steady.scenario import Scenario


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
    scenario = Scenario.of(schedule, profile, workload, steady_state, variation)
    return estimate_of(scenario, outcome(scenario, schedule.policy, vars(schedule)))


def outcome(scenario: Scenario, policy: str, controls: Mapping[str, int | None]) -> Outcome:
    """What one replica's steady state comes to under a policy's control variables, by their names in a Schedule."""

    def of(name: str) -> int:
        return controls.get(name) or 0

    encode_count = controls.get("encode_micro_batches")
    match policy:
        case "rra":
            return rra.outcome(scenario, of("encode_batch"), of("decode_iterations"), encode_count)
        case "waa-c" | "waa-m":
            return waa.outcome(scenario, of("encode_batch"), of("micro_batches"))
        case "static":
            return static.outcome(scenario, of("encode_batch"), encode_count)
        case "hybrid":
            return static.outcome(scenario, of("encode_batch"), encode_count, of("micro_batches"))
        case "orca":
            return orca.outcome(scenario, of("max_num_seqs"), of("prefills_per_step"))
        case "chunked":
            return chunked.outcome(scenario, of("max_num_seqs"), of("max_num_batched_tokens"))
    raise InputError(f"There is no policy '{policy}'.")


def timeline(schedule: Schedule, profile: Profile, workload: Workload | None = None, requests: int = 64) -> Timeline:
    """A simulated run of `requests` requests drawn from the workload, all there from the start."""
    load = workload or schedule.workload
    drawn = [replace(r, arrival_s=0.0) for r in load.draw(requests, context=schedule.model.spec.context)]
    return replay(schedule, profile, drawn).timeline
