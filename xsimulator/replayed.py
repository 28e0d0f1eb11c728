"""The steady state of a policy without a closed form, measured in a replay.

The requests are drawn from the workload and all arrive at the start. Only the middle counts: from one fifth to four
fifths of the completions.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from xcore.arrays import Array
from xcore.batching.admission import Admission, most_cached
from xcore.policies import TRAITS
from xcore.policies.control import Control, kinds
from xcore.specs.request_times import RequestTimes
from xcore.specs.schedule import BLOCK_SIZE, ModelReference, ProfileReference, Schedule
from xsimulator.replay.event_simulator import replay
from xsimulator.steady.closed_form import Steady
from xsimulator.steady.outcome import Lifetime, Outcome, StageDemand
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.times import Times

_ROUNDS, _LEAST, _MOST = 32, 1024, 4096
"""Requests to replay: the number per possible resident, the least and the most."""


def steady(policy: str, scenario: Scenario) -> Steady:
    """Return a policy's steady state in a scenario as a cached function of its control variables."""
    known = functools.cache(lambda controls: _outcome(policy, scenario, dict(controls)))
    names = (*kinds(TRAITS[policy].control), "grows", "kv_blocks")
    return lambda controls: known(tuple((name, controls[name]) for name in names if controls.get(name)))


def _outcome(policy: str, scenario: Scenario, controls: dict[str, int]) -> Outcome:
    workload, model = scenario.load.workload, scenario.replica.cost_model.model
    blocks = controls.pop("kv_blocks", None)
    admission: Admission = "grow" if controls.pop("grows", False) else "reserve"
    control = TRAITS[policy].record(controls)
    demand, fits = _demand(scenario, control, blocks)
    count = min(max(_ROUNDS * (control.of_kind("residents") or 0), _LEAST), _MOST)
    if not fits:
        nothing = np.zeros(len(scenario.replica.stages))
        return Outcome(
            0.0,
            lambda n: Lifetime(*np.zeros((3, len(n)))),
            lambda: Times.normal(0.0),
            demand,
            0,
            lambda: 0.0,
            nothing,
            "memory",
        )
    requests = (scenario.load.asked or workload).draw(count, context=model.longest_request)
    schedule = _schedule(policy, scenario, control, admission, demand.blocks)
    engine_alone = replace(scenario.replica.cost_model.profile, front_end_s=0.0)  # estimates add it
    run = replay(schedule, engine_alone, requests, timeline=False)
    ends = np.sort([served.finish_s for served in run.served])
    first, last = count // 5, count - 1 - count // 5
    rate = float((last - first) / (ends[last] - ends[first]))
    steps, lifetime = _first_tokens(run.served), _lifetime(run.served)
    residents = rate * float(lifetime(workload.output.s).seconds @ workload.output.p)
    busy = np.array([run.estimate.utilisation[stage.devices[0]] for stage in scenario.replica.stages])
    batch, preemptions = max(1, round(residents)), run.preemptions / count

    def first_token() -> Times:
        return Times.normal(float(steps.mean()), float(steps.std()))

    return Outcome(
        rate, lifetime, first_token, demand, batch, lambda: residents, busy, "decoding", preemptions=preemptions
    )


def _demand(scenario: Scenario, control: Control, blocks: int | None) -> tuple[StageDemand, bool]:
    """Return a schedule's demand, and whether its longest request fits.

    Without `blocks`, the cache holds as many blocks as the possible residents need, or all that fit.
    """
    workload, model = scenario.load.workload, scenario.replica.cost_model.model
    residents = control.of_kind("residents")
    prompts = (control.of_kind("prompts") or 1) * workload.input.quantile(0.99)
    tokens = float(control.of_kind("tokens") or prompts + (residents or 0))
    longest = most_cached(workload.input.max, workload.output.max, scenario.replica.encoder_decoder)
    longest = min(model.longest_request or longest, longest)
    sequences = residents or 1
    need, room = -(-longest // BLOCK_SIZE), scenario.replica.room((tokens, sequences))
    if room < need:
        return StageDemand(need, tokens, sequences), False
    if blocks:
        return StageDemand(blocks, tokens, sequences), blocks >= need
    return StageDemand(min(room, residents * need) if residents else room, tokens, sequences), True


def _schedule(policy: str, scenario: Scenario, control: Control, admission: Admission, kv_blocks: int) -> Schedule:
    """Build a schedule of one replica."""
    cost_model = scenario.replica.cost_model
    return Schedule(
        version=Schedule.VERSION,
        policy=policy,
        control=control,
        admission=admission,
        kv_blocks=kv_blocks,
        model=ModelReference(cost_model.model, cost_model.model.fingerprint),
        cluster=cost_model.cluster,
        workload=scenario.load.question,
        prefix_caching=scenario.load.cached is not None,
        profile=ProfileReference(cost_model.profile.source, cost_model.profile.fingerprint),
        stages=scenario.replica.stages,
        dtype=cost_model.profile.dtype,
        kv_dtype=cost_model.kv_dtype,
        bound=scenario.bound.name,
        percentile=scenario.bound.percentile,
        speculation=scenario.load.speculation,
    )


def _first_tokens(served: tuple[RequestTimes, ...]) -> Array:
    """Return the seconds from the start of each request's prefill to its first token [requests]."""
    return np.array([request.first_token_s - request.start_s for request in served])


def _lifetime(served: tuple[RequestTimes, ...]) -> Callable[[Array], Lifetime]:
    """Return the lifetime by output length: the time to first token plus the mean time of each later token."""
    first = _first_tokens(served)
    many = [request for request in served if request.output_tokens > 1]
    gaps = np.array([(r.finish_s - r.first_token_s) / (r.output_tokens - 1) for r in many] or [0.0])

    def lifetime(lengths: Array) -> Lifetime:
        more = lengths - 1
        after = more * gaps.std()
        return Lifetime(first.mean() + more * gaps.mean(), np.hypot(first.std(), after), after)

    return lifetime
