"""Replanning during serving, for the rates at which the models' requests actually arrive."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from xcore import document
from xcore.errors import Infeasible, InputError
from xcore.quantity import figure_text
from xcore.searching import process_text, read_problem, write_answer
from xcore.specs.cluster_plan import Plan, PlannedModel
from xcore.specs.profile import Profile
from xcore.specs.workload import Workload
from xmulti.plans.demands import ModelDemand
from xscheduler.settings import Setting
from xserver.engines.engine_process import signal_session

WORTH = 0.25
"""Least relative growth of the headroom: engines restart for another plan, and replays are off by about a tenth."""
ROOM = 2.0
"""Keep a plan with this much headroom, and no less than when it was made: load may return."""
_SOLO_REQUESTS = 200
"""Number of requests for the mean time alone."""
_PROCESS = process_text("xmulti.serving.replan")


@dataclass(frozen=True)
class Watched:
    """A server's measurements of one model of its plan."""

    name: str
    rate_seq_s: float
    """The current arrival rate."""
    profile: Profile
    """The profile with which its engine has opened: the machine as it was measured."""
    workload: Workload
    """Lengths for which its current schedule is."""
    latencies_s: tuple[float, ...]
    """Latencies from arrival, of requests that arrived and were answered under this plan."""


@dataclass(frozen=True)
class ReplanInput:
    """The input of `replan`."""

    plan: Plan
    watched: tuple[Watched, ...]
    """One for each of the plan's models."""


class Replanned(NamedTuple):
    """The plan to follow, or None; and the reason."""

    plan: Plan | None
    why: str
    failed: bool = False
    """Whether no other plan exists."""
    error: float | None = None
    """Relative error of the old plan's predictions; None where that isn't known."""


def why_not_watched(plan: Plan) -> str:
    """Return why no plan can be searched to replace this one; empty if one can."""
    from xmulti.plans.planning import METHODS

    if plan.method not in METHODS:
        return f"its method '{plan.method}' is none of {', '.join(METHODS)}"
    if several := next((name for name, replicas in plan.replicas.items() if len(replicas) > 1), None):
        return f"model '{several}' has several replicas"
    unrated = next((model.name for model in plan.models if not model.rate_seq_s), None)
    return f"model '{unrated}' was planned without a rate" if unrated else ""


def next_interval_s(stayed_s: float | None, error: float | None) -> float:
    """Return the minimum time that a plan stays after a search.

    This is SeaLLM's interval, which grows while predictions are accurate. `stayed_s` is the previous interval; None:
    there was none.
    """
    from xmulti.sharing.replacement import FIRST_S, next_interval

    if stayed_s is None:
        return FIRST_S
    return stayed_s if error is None else next_interval(stayed_s, error)


async def in_a_process(replan_input: ReplanInput) -> Replanned:
    """Run `replan` in a separate process, and return its result.

    The process ends with this one, or when the task is cancelled.
    """
    problem = await asyncio.to_thread(lambda: document.dumps(document.to_dict(replan_input), indent=None) + "\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROCESS, *sys.path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin and process.stdout
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended already
            process.stdin.write(problem.encode())
            await process.stdin.drain()
        answer = (await process.stdout.read()).decode()
        code = await process.wait()
    finally:
        signal_session(process.pid, signal.SIGKILL)  # with the processes that it has started
        await process.wait()
    if not answer:
        return Replanned(None, f"the search was ended (exit code {code})", failed=True)
    return document.from_dict(Replanned, document.parse_json(answer, "the search's answer"), "the search's answer")


def main() -> None:
    """Read a problem, search a plan, and write the answer: the process that searches."""
    replan_input = read_problem(ReplanInput)
    try:
        answer = replan(replan_input)
    except (InputError, Infeasible) as error:
        answer = Replanned(None, str(error), failed=True)
    write_answer(answer)


def replan(replan_input: ReplanInput) -> Replanned:
    """Return the best plan of the same method for the current rates, if it is clearly better than the old plan.

    A search is made only if the old plan has less headroom for these rates than for its own, or less than `ROOM`. A
    plan that doesn't sustain the rates is returned too, if its headroom is higher by the same factor.
    """
    from xmulti.plans.planning import propose

    plan = replan_input.plan
    by_name = {seen.name: seen for seen in replan_input.watched}
    watched = [by_name[model.name] for model in plan.models]
    demands = tuple(_demand(model, plan, seen) for model, seen in zip(plan.models, watched, strict=True))
    error = promise_error(plan, demands, watched)
    held = at_rates_of(plan, demands)
    planned = [replace(demand, rate_seq_s=model.rate_seq_s) for demand, model in zip(demands, plan.models, strict=True)]
    was, now = at_rates_of(plan, planned).headroom or 0.0, held.headroom or 0.0
    if now >= max(was, ROOM):
        return Replanned(None, f"all models can reach {figure_text(now)} times their rates", error=error)
    (proposal,) = propose(demands, plan.cluster, (plan.method,), most_replicas=1)
    found = proposal.plan or proposal.near
    if found is None:
        return Replanned(None, proposal.why_not, True, error)
    then = found.headroom or 0.0
    texts = [f"{figure_text(headroom)} times" for headroom in (now, then)]
    if then <= (1 + WORTH) * now:
        return Replanned(
            None, (f"all models can reach {texts[0]} their rates, and {texts[1]} with another plan"), error=error
        )
    why = f"all models can reach {texts[1]} their rates, and only {texts[0]} with the current plan"
    return Replanned(moving_least(replace(found, method=plan.method), held), why, error=error)


def _demand(model: PlannedModel, plan: Plan, seen: Watched) -> ModelDemand:
    schedule = model.schedule
    setting = Setting(schedule.model.spec, plan.cluster, seen.workload, seen.profile, schedule.kv_dtype, ())
    # a server runs each engine on one node
    return ModelDemand(model.name, setting, seen.rate_seq_s, None, schedule.latency_bound_s, model.directory, True)


def at_rates_of(plan: Plan, demands: Sequence[ModelDemand]) -> Plan:
    """Return the plan unchanged, replayed at the current rates."""
    from xmulti.plans.plan_evaluation import evaluated

    asked = {demand.name: demand for demand in demands}
    models = [replace(model, rate_seq_s=asked[model.name].rate_seq_s, goodput_seq_s=None) for model in plan.models]
    replayed = [model for unit in replace(plan, models=tuple(models)).units for model in evaluated(unit, asked)]
    by_name = {model.name: model for model in replayed}
    return replace(plan, models=tuple(by_name[model.name] for model in plan.models))


def moving_least(found: Plan, held: Plan) -> Plan:
    """Return the new plan, for the node of the old plan, with as few moves as possible.

    Models that have as many devices, with the same other models, keep devices and schedules. This requires that it
    leaves them as much headroom as the complete new plan. All other models get the remaining devices.
    """
    before = {_together(unit): unit for unit in held.units}
    staying: dict[str, PlannedModel] = {}
    for unit in found.units:
        same = before.get(_together(unit), ())
        if same and min(model.headroom or 0.0 for model in same) >= (found.headroom or 0.0):
            staying |= {model.name: model for model in same}
    taken = {device for model in staying.values() for device in model.devices}
    free = [device for device in range(found.cluster.devices) if device not in taken]
    for unit in found.units:
        if unit[0].name not in staying:
            devices, free = tuple(free[: len(unit[0].devices)]), free[len(unit[0].devices) :]
            staying |= {model.name: replace(model, devices=devices) for model in unit}
    directories = {model.name: model.directory for model in held.models}
    return replace(found, models=tuple(replace(staying[m.name], directory=directories[m.name]) for m in found.models))


def _together(unit: Sequence[PlannedModel]) -> tuple[int, frozenset[str]]:
    """Return the number of devices and the names of a unit's models: equal for the same models on as many devices."""
    return len(unit[0].devices), frozenset(model.name for model in unit)


def promise_error(plan: Plan, demands: Sequence[ModelDemand], watched: Sequence[Watched]) -> float | None:
    """Return the error of the plan's replay against the measurements, as SeaLLM defines it.

    Return None if either isn't known.
    """
    from xmulti.plans.mean_batch_one_latency import mean_batch_one_latency
    from xmulti.sharing.replacement import Performance

    promised, came = [], []
    for model, demand, seen in zip(plan.models, demands, watched, strict=True):
        setting, bound_s = demand.setting, demand.bound_s
        drawn = setting.workload.without_requests.draw(_SOLO_REQUESTS, 0, setting.model.longest_request)
        alone_s = mean_batch_one_latency(setting, drawn)
        if model.attainment is None or model.normalised_latency is None or not model.rate_seq_s or not alone_s:
            return None
        promised.append((model.rate_seq_s, model.attainment, model.normalised_latency))
        came += [(bound_s is None or latency_s <= bound_s, latency_s / alone_s) for latency_s in seen.latencies_s]
    if not came:
        return None
    rates, shares, normalised = np.array(promised).T
    estimate = Performance(float(np.average(shares, weights=rates)), float(np.average(normalised, weights=rates)))
    in_time, over_alone = np.mean(came, axis=0)
    return estimate.error(Performance(float(in_time), float(over_alone)))
