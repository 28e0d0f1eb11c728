"""Entry points of the package: a schedule's steady-state Estimate and the Timeline of a typical run."""

from dataclasses import replace

from xcore.policies.from_schedule import checked
from xcore.specs.estimate import Estimate
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import Timeline
from xcore.specs.workload import Workload
from xsimulator import replayed
from xsimulator.replay.event_simulator import replay
from xsimulator.steady import chunked, hybrid, orca, rra, static, waa
from xsimulator.steady.closed_form import Controls, Steady
from xsimulator.steady.outcome import Needs, Outcome, estimate_of
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
    """Return the steady-state estimate of a schedule, under its own workload or under `workload`.

    `steady_state="paper"` uses the paper's formulas. `variation`: whether latencies allow for varying encoding times.
    """
    scenario = Scenario.of(checked(schedule), profile, workload, steady_state, variation)
    steady_estimate = estimate_of(scenario, outcome(scenario, schedule.policy, controls_of(schedule)))
    blocks = schedule.kv_blocks
    return replace(steady_estimate, kv_blocks=blocks, kv_tokens=blocks * schedule.block_size)


CLOSED_FORMS = {
    policy: form
    for form in (file.CLOSED_FORM for file in (static, hybrid, orca, chunked, rra, waa))
    for policy in form.policies
}
"""The closed form of each policy, by the policy's name."""
GROWING = frozenset(policy for policy, form in CLOSED_FORMS.items() if form.grows)
"""The policies whose closed form covers admission *grow* too."""


def controls_of(schedule: Schedule) -> Controls:
    """Return a schedule's control variables, with the cache settings that steady states read."""
    cache = {"grows": schedule.admission == "grow", "kv_blocks": schedule.kv_blocks, "block_size": schedule.block_size}
    return {name: value for name, value in schedule.control.variables.items() if value is not None} | cache


def has_steady_state(schedule: Schedule) -> bool:
    """Return whether a schedule's steady state has a closed form; if not, replay it."""
    return schedule.policy in CLOSED_FORMS and (schedule.admission == "reserve" or schedule.policy in GROWING)


def steady(policy: str, scenario: Scenario) -> Steady:
    """Return a policy's steady state in a scenario: its closed form or, without one, the result of a replay."""
    return CLOSED_FORMS[policy].steady(scenario) if policy in CLOSED_FORMS else replayed.steady(policy, scenario)


def needs(scenario: Scenario, policy: str, controls: Controls) -> Needs | None:
    """Return what a replica needs under a policy's control variables; None if only its outcome tells."""
    return CLOSED_FORMS[policy].needs(scenario, controls) if policy in CLOSED_FORMS else None


def outcome(scenario: Scenario, policy: str, controls: Controls) -> Outcome:
    """Return the steady state of one replica under a policy's control variables."""
    if controls.get("grows") and policy not in GROWING:
        return replayed.steady(policy, scenario)(controls)
    return steady(policy, scenario)(controls)


def timeline(schedule: Schedule, profile: Profile, requests: int = 64) -> Timeline:
    """Simulate `requests` requests drawn from the schedule's workload, all of which arrive at 0 s."""
    drawn = schedule.workload.draw(requests, context=schedule.model.spec.longest_request)
    return replay(schedule, profile, [replace(request, arrival_s=0.0) for request in drawn]).timeline
