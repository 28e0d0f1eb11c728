"""The one door: a schedule's steady-state Estimate and the Timeline of a typical period, whatever its policy."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from xcore.policies import checked
from xcore.specs.estimate import Estimate
from xcore.specs.profile import Profile
from xcore.specs.schedule import BLOCK_SIZE, Schedule
from xcore.specs.timeline import Timeline
from xcore.specs.workload import Workload
from xsimulator import replayed
from xsimulator.replay.event_simulator import replay
from xsimulator.steady import chunked, orca, rra, static
from xsimulator.steady.occupancy import RESERVED, Pool
from xsimulator.steady.outcome import Outcome, estimate_of
from xsimulator.steady.residents import Form
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.waa import WAA

Controls = Mapping[str, Any]
"""A policy's control variables by their names in a Schedule."""
Steady = Callable[[Controls], Outcome]
"""A policy's steady state in one scenario, by its control variables."""


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
    steady_estimate = estimate_of(scenario, outcome(scenario, schedule.policy, vars(schedule)))
    blocks = schedule.kv_blocks
    return replace(steady_estimate, kv_blocks=blocks, kv_tokens=blocks * schedule.block_size)


def _waa(scenario: Scenario) -> Steady:
    sides = functools.cache(functools.partial(WAA, scenario))

    def outcome(controls: Controls) -> Outcome:
        blocks = controls.get("kv_blocks")
        pool = blocks and blocks * controls.get("block_size", BLOCK_SIZE) // BLOCK_SIZE
        return sides(controls["micro_batches"]).outcome(controls["encode_batch"], pool)

    return outcome


def _static(scenario: Scenario) -> Steady:
    return lambda controls: static.outcome(scenario, controls["encode_batch"], controls.get("encode_micro_batches"))


def _hybrid(scenario: Scenario) -> Steady:
    return lambda controls: static.outcome(
        scenario, controls["encode_batch"], controls.get("encode_micro_batches"), controls["micro_batches"]
    )


def _pool(controls: Controls) -> Pool:
    """A schedule's cache; of a point of a search, that isn't one yet, what its residents need."""
    if controls.get("admission", "reserve") == "reserve":
        return RESERVED
    return Pool(True, controls["kv_blocks"] * controls["block_size"] // BLOCK_SIZE if "kv_blocks" in controls else None)


def _orca(scenario: Scenario) -> Steady:
    return lambda controls: orca.outcome(
        scenario, controls["max_num_seqs"], controls["prefills_per_step"], _pool(controls)
    )


def _chunked(scenario: Scenario) -> Steady:
    return lambda controls: chunked.outcome(
        scenario, controls["max_num_seqs"], controls["max_num_batched_tokens"], _pool(controls)
    )


def _rra(scenario: Scenario) -> Steady:
    return lambda controls: rra.outcome(
        scenario, controls["encode_batch"], controls["decode_iterations"], controls.get("encode_micro_batches")
    )


STEADY: dict[str, Callable[[Scenario], Steady]] = {
    "static": _static,
    "hybrid": _hybrid,
    "orca": _orca,
    "chunked": _chunked,
    "rra": _rra,
    "waa-c": _waa,
    "waa-m": _waa,
}
"""By the policy's name."""
GROWING = frozenset({"orca", "chunked"})
"""Those whose steady state is known with admission *grow* too."""


def has_steady_state(schedule: Schedule) -> bool:
    """Whether a schedule's steady state is known in closed form; if not, replay it."""
    return schedule.policy in STEADY and (schedule.admission == "reserve" or schedule.policy in GROWING)


def steady(policy: str, scenario: Scenario) -> Steady:
    """A policy's steady state in a scenario; that of a replay where it has none in closed form."""
    return STEADY[policy](scenario) if policy in STEADY else replayed.steady(policy, scenario)


def outcome(scenario: Scenario, policy: str, controls: Controls) -> Outcome:
    """What one replica's steady state comes to under a policy's control variables."""
    if controls.get("admission") == "grow" and policy not in GROWING:
        return replayed.steady(policy, scenario)(controls)
    return steady(policy, scenario)(controls)


def timeline(schedule: Schedule, profile: Profile, requests: int = 64) -> Timeline:
    """A simulated run of `requests` requests drawn from the schedule's workload, all there from the start."""
    drawn = schedule.workload.draw(requests, context=schedule.model.spec.longest_request)
    return replay(schedule, profile, [replace(request, arrival_s=0.0) for request in drawn]).timeline
