"""`simulate --plan`: the predicted latencies of the requests of a plan's models, one by one."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xcore import document
from xcore.duration import duration_text
from xcore.quantity import NOTHING, figure_text, percent_text
from xcore.specs.cluster_plan import Plan, PlannedModel, joined
from xcore.specs.iteration_profile import IterationProfile
from xcore.specs.request_times import latencies, percentiles
from xcore.specs.timeline import Timeline, chrome_trace
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.arrivals import random_arrivals
from xcore.traces.fit_context import fit_context
from xcore.traces.trace import read_model_trace
from xmulti.files.models_file import check_requests, profiles_by_model
from xmulti.plans.plan_evaluation import in_one_time, in_time
from xmulti.serving.planned_units import check_models, check_schedule, read_plan_file
from xmulti.sharing.plan_order import PlanOrder, replayed_order
from xmulti.sharing.plan_replay import ModelReplay, replay_plan
from xmulti.sharing.unit_loads import AnyProfile
from xprofiler import rooflines
from xprofiler.profiles import as_found, find_profile
from xscheduler.ordering import USUAL_TAU

REQUESTS = 1000
"""Requests of each model, if neither a trace nor the plan gives a number.

A model that shares devices with one of a lower rate has more.
"""
MOST = 10_000
"""Most requests of such a model."""
_COLUMNS = ("model", "node", "requests", "requests/s", "latency p50", "p99", "TTFT p99", "in time", "preemptions")


@dataclass(frozen=True)
class PlanPrediction:
    """The result of a simulation, for scripts and for people."""

    plan: Plan
    facts: dict[str, object]
    columns: tuple[str, ...]
    rows: list[list[str]]
    assumptions: tuple[str, ...]


def simulate_plan(
    path: Path,
    trace: Path | None,
    timeline: Path | None,
    profile: Sequence[str] = (),
    columns: dict[str, str] | None = None,
    scale: bool = False,
    order: str | None = None,
    tau: float | None = None,
) -> PlanPrediction:
    """Replay the requests of a trace with a column `model`, or random ones at each model's rate; write their timeline.

    `profile` names files, of layers or of iterations, as in `profiles_by_model`. `columns` are the columns of the
    trace. `scale` decides whether its lengths are scaled to the models' contexts. `order` is one of
    `plan_order.REPLAYED`; None: the order of the plan's method. `tau` is Kendall's tau of simulated rankers.
    """
    plan = read_plan_file(path)
    names = check_models(plan, f"'{path}'")
    for model in plan.models:
        check_schedule(model)
    files = profiles_by_model(profile, names, path)
    assumptions: list[str] = []
    requests = read_model_trace(trace, names, columns, assumptions.append) if trace else _drawn(plan)
    profiles: dict[tuple[str, tuple[int, ...]], AnyProfile] = {}
    assumptions += _fit_contexts(requests, plan, scale)
    for model in plan.models:
        profiles[model.key], assumed = _profile(model, files.get(model.name))
        if (text := f"{model.name}: {assumed}") not in assumptions:
            assumptions.append(text)
    chosen = replayed_order(order, tau, requests)
    if chosen:
        assumptions.append(_order_text(chosen, tau, plan))
    begin_s = time.perf_counter()
    replays = replay_plan(
        plan, lambda model: profiles[model.key], requests, timeline=timeline is not None, order=chosen
    )
    wall_s = time.perf_counter() - begin_s
    if timeline:
        _write_timeline(timeline, replays)
    shown = [(of, replays[name], plan.nodes_of(*of)) for name, of in plan.replicas.items() if name in replays]
    facts = {"models": [_facts(*of_model) for of_model in shown], "wall_seconds": wall_s}
    kept = [place for place, column in enumerate(_COLUMNS) if column != "node" or plan.cluster.nodes > 1]
    rows = [[row[place] for place in kept] for row in (_row(*of_model) for of_model in shown)]
    return PlanPrediction(plan, facts, tuple(_COLUMNS[place] for place in kept), rows, tuple(assumptions))


def _order_text(order: PlanOrder, tau: float | None, plan: Plan) -> str:
    """Return a sentence about an order."""
    text = f"order: {order.name}"
    if order.name == "learned":
        text += (
            f", with simulated rankers whose Kendall's tau is {tau or USUAL_TAU:g}; by its place among the scores of "
            "its model's requests here, a score stands for one of the model's planned output lengths, the highest for "
            "the shortest"
        )
    if any(model.share and model.share.by == "space" for model in plan.models):
        text += "; models that share by space take turns, so that it orders only each model's own requests"
    return text


def _write_timeline(path: Path, replays: Mapping[str, ModelReplay]) -> None:
    """Write all models' spans by device, on threads named after the models."""
    spans = sorted((span for of_model in replays.values() for span in of_model.spans), key=lambda s: s.start_s)
    models = {(span.device, span.stage): name for name, of_model in replays.items() for span in of_model.spans}
    trace = chrome_trace([Timeline("predicted", tuple(spans))], models)
    document.write_text(path, document.dumps(trace, indent=None))


def _fit_contexts(requests: dict[str, list[RequestLengths]], plan: Plan, scale: bool) -> list[str]:
    """Leave out or scale the requests that exceed a model's context, and return sentences about this."""
    notes = []
    for name, replicas in plan.replicas.items():
        if of_model := requests.get(name):
            spec = replicas[0].schedule.model.spec
            fit, scaling = fit_context(Workload.from_requests(name, of_model), spec, scale)
            requests[name] = list(fit.requests or ())
            notes += [f"{name}: {text}" for text in scaling]
    return notes


def _drawn(plan: Plan) -> dict[str, list[RequestLengths]]:
    """Return requests of all models.

    Equal models get different requests, since otherwise their requests would arrive at the same times.
    """
    counts: dict[str, int] = {}
    for units in joined(plan.units):
        rates = {model.name: model.rate_seq_s for unit in units for model in unit if model.rate_seq_s}
        counts |= in_one_time(dict.fromkeys(rates, REQUESTS), rates, MOST) if rates else {}
    return {n: _drawn_of(of_n[0], counts.get(n), place) for place, (n, of_n) in enumerate(plan.replicas.items())}


def _drawn_of(model: PlannedModel, count: int | None, seed: int) -> list[RequestLengths]:
    """Return requests of a model's workload at its rate, or the plan's number of requests, there from the beginning."""
    count, spec = model.requests or count or REQUESTS, model.schedule.model.spec
    check_requests(f"Model '{model.name}' of the plan", count)
    drawn = model.schedule.workload.draw(count, seed, spec.longest_request)
    if model.rate_seq_s is None:
        return list(drawn)
    arrivals = random_arrivals(model.rate_seq_s, count, (seed, 1)).tolist()
    return [replace(request, arrival_s=arrival) for request, arrival in zip(drawn, arrivals, strict=True)]


def _profile(model: PlannedModel, given: str | None) -> tuple[AnyProfile, str]:
    """Return a model's profile, and a text that names it.

    This is the given profile; else the roofline with which its schedule was found, or a replacement for the schedule's
    profile.
    """
    schedule = model.schedule
    if given not in (None, "roofline"):
        data = document.read_json(given)
        if isinstance(data, dict) and "tables" in data:
            iterations = document.from_dict(IterationProfile, data, f"'{given}'")
            return iterations, f"iterations of {iterations.model} on {iterations.device}, from '{given}'"
    elif roofline := rooflines.found_on(schedule):
        return roofline, f"the roofline with which it was planned, {rooflines.engine_text(roofline)}"
    where = (schedule.model.spec, schedule.cluster, schedule.dtype)
    profile, which = find_profile(given, *where, kv_dtype=schedule.kv_dtype)
    profile, other = as_found(profile, schedule)
    return profile, "; ".join(filter(None, (which, other)))


def _since(model: PlannedModel) -> str:
    return "start" if model.rate_seq_s is None else "arrival"


def _facts(replicas: Sequence[PlannedModel], replayed: ModelReplay, nodes: Sequence[int]) -> dict[str, object]:
    model = replicas[0]
    times, served = latencies(replayed.served, _since(model)), replayed.served
    seconds = max(s.finish_s for s in served)
    return {
        "name": model.name,
        "requests": len(served),
        "replicas": list(replayed.sent),
        "nodes": list(nodes),
        "seconds": seconds,
        "throughput_seq_s": len(served) / seconds,
        "throughput_tok_s": sum(s.output_tokens for s in served) / seconds,
        "attainment": in_time(served, model.schedule.latency_bound_s),
        "preemptions": replayed.preemptions,
        **{name: percentiles(times[name]) for name in ("ttft", "tpot", "latency")},
    }


def _row(replicas: Sequence[PlannedModel], replayed: ModelReplay, nodes: Sequence[int]) -> list[str]:
    model = replicas[0]
    times, served = latencies(replayed.served, _since(model)), replayed.served
    latency, ttft, bound_s = percentiles(times["latency"]), percentiles(times["ttft"]), model.schedule.latency_bound_s
    return [
        model.name,
        ", ".join(map(str, nodes)),
        f"{len(served):,}",
        figure_text(len(served) / max(s.finish_s for s in served)),
        *(NOTHING if s is None else duration_text(s) for s in (latency["p50"], latency["p99"], ttft["p99"])),
        NOTHING if bound_s is None else percent_text(in_time(served, bound_s)),
        str(replayed.preemptions),
    ]
