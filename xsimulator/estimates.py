"""The one door: a schedule's steady-state Estimate and the Timeline of a typical period, whatever its policy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exegpt.errors import InputError
from exegpt.estimate import Estimate
from exegpt.policies import checked
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
    scenario = Scenario.of(checked(schedule), profile, workload, steady_state, variation)
    return estimate_of(scenario, outcome(scenario, schedule.policy, vars(schedule)))


Controls = Mapping[str, int | None]
"""A policy's control variables by their names in a Schedule."""


@dataclass(frozen=True)
class Steady:
    """A policy's steady state in closed form."""

    outcome: Callable[[Scenario, Mapping[str, Any]], Outcome]
    decode_batch: Callable[[Scenario, Mapping[str, Any]], int] | None = None
    """Its target B_D, where it has one."""


_WAA = Steady(
    lambda where, own: waa.outcome(where, own["encode_batch"], own["micro_batches"]),
    lambda where, own: waa.decode_batch(where, own["encode_batch"], own["micro_batches"]),
)
STEADY = {
    "static": Steady(lambda where, own: static.outcome(where, own["encode_batch"], own.get("encode_micro_batches"))),
    "hybrid": Steady(
        lambda where, own: static.outcome(
            where, own["encode_batch"], own.get("encode_micro_batches"), own["micro_batches"]
        )
    ),
    "orca": Steady(lambda where, own: orca.outcome(where, own["max_num_seqs"], own["prefills_per_step"])),
    "chunked": Steady(lambda where, own: chunked.outcome(where, own["max_num_seqs"], own["max_num_batched_tokens"])),
    "rra": Steady(
        lambda where, own: rra.outcome(
            where, own["encode_batch"], own["decode_iterations"], own.get("encode_micro_batches")
        ),
        lambda where, own: rra.decode_batch(where, own["encode_batch"], own["decode_iterations"]),
    ),
    "waa-c": _WAA,
    "waa-m": _WAA,
}
"""By the policy's name."""


def steady(policy: str) -> Steady:
    """A policy's steady state; InputError where nobody has written it down."""
    if policy not in STEADY:
        raise InputError(f"Policy '{policy}' has no steady state in closed form: replay it.")
    return STEADY[policy]


def outcome(scenario: Scenario, policy: str, controls: Controls) -> Outcome:
    """What one replica's steady state comes to under a policy's control variables."""
    return steady(policy).outcome(scenario, controls)


def timeline(schedule: Schedule, profile: Profile, workload: Workload | None = None, requests: int = 64) -> Timeline:
    """A simulated run of `requests` requests drawn from the workload, all there from the start."""
    load = workload or schedule.workload
    drawn = [replace(r, arrival_s=0.0) for r in load.draw(requests, context=schedule.model.spec.context)]
    return replay(schedule, profile, drawn).timeline
