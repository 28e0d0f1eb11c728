"""Requests of several models through a plan: models with separate devices, units that share devices, and replicas."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from xcore.batching import deal
from xcore.orders import fcfs
from xcore.specs.cluster_plan import Plan, PlannedModel, Share, Unit, joined, units_of
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimes, RequestTimesColumns
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import Span
from xcore.specs.workload import RequestLengths
from xmulti.sharing.plan_engines import PlanEngines, ProfileOf
from xmulti.sharing.plan_order import PlanOrder
from xmulti.sharing.replay import Stop, replay_unit, sequences_of
from xmulti.sharing.unit_loads import CONTENTION, AnyProfile, loads_of, overhead_of, rule_of
from xsimulator.replay.compiled import Replicas, RequestArrays, is_compiled
from xsimulator.replay.event_simulator import replay


@dataclass(frozen=True)
class ModelReplay:
    """The results of one model's requests."""

    served: tuple[RequestTimes, ...]
    """In order of completion."""
    preemptions: int
    spans: tuple[Span, ...] = ()
    """Numbered by the plan's devices; empty if they weren't asked for."""
    sent: tuple[int, ...] = ()
    """The number of requests that each replica got; empty without replicas."""


def replay_plan(
    plan: Plan,
    profile_of: ProfileOf,
    requests: Mapping[str, Items[RequestLengths]],
    timeline: bool = False,
    order: PlanOrder | None = None,
) -> dict[str, ModelReplay]:
    """Run every model's requests through a plan, in an order; None: that of the plan's method.

    Requests are by model name; they may be for only some models of the plan.

    Raises:
        InputError: A model's cache could not hold a request.
    """
    replays: dict[str, ModelReplay] = {}
    for units in joined(units_of(model for model in plan.models if model.name in requests)):
        replays |= replay_joined(units, profile_of, requests, timeline, order=order)
    return replays


def replay_joined(
    units: Items[Unit],
    profile_of: ProfileOf,
    requests: Mapping[str, Items[RequestLengths]],
    timeline: bool = False,
    stop: Stop | None = None,
    order: PlanOrder | None = None,
) -> dict[str, ModelReplay]:
    """Replay one unit, or several over which models' replicas are spread. `stop` ends it early."""
    if len(units) > 1:
        return _dispatched(units, profile_of, requests, timeline, stop, order)
    (unit,) = units
    return replay_models(unit, {model.name: profile_of(model) for model in unit}, requests, timeline, stop, order)


def _dispatched(
    units: Items[Unit],
    profile_of: ProfileOf,
    requests: Mapping[str, Items[RequestLengths]],
    timeline: bool,
    stop: Stop | None,
    order: PlanOrder | None,
) -> dict[str, ModelReplay]:
    """Replay units with a dispatcher, which sends each request to a replica."""
    names = list(dict.fromkeys(model.name for unit in units for model in unit))
    engines = PlanEngines(units, profile_of, max(len(requests[name]) for name in names), timeline, order)
    for name in names:
        hints = order.hints(name, requests[name]) if order else ()
        for sequence in sequences_of(requests[name], hints):
            engines.dispatcher.submit(name, sequence)
    for now, _ in engines.run():
        if stop and stop(engines.served, now):
            break
    for engine in engines.each:
        engine.check()
    sent = Counter((engine, name) for (name, _), engine in engines.dispatcher.sent.items())
    replays = {}
    for name in names:
        hosts = [(engine, model) for engine in engines.each for model in engine.unit if model.name == name]
        preemptions = sum(engine.preemptions(name) for engine, _ in hosts)
        spans = tuple(span for engine, model in hosts for span in _moved(engine.spans(model), model))
        of_replicas = tuple(sent[engine, name] for engine, _ in hosts) if len(hosts) > 1 else ()
        replays[name] = ModelReplay(engines.in_order(name), preemptions, spans, of_replicas)
    return replays


def replay_models(
    unit: Items[PlannedModel],
    profiles: Mapping[str, AnyProfile],
    requests: Mapping[str, Items[RequestLengths]],
    timeline: bool = False,
    stop: Stop | None = None,
    order: PlanOrder | None = None,
) -> dict[str, ModelReplay]:
    """Replay models that share devices, or one model alone. `stop` ends a unit's replay early."""
    profile = profiles[unit[0].name]
    if unit[0].share is None and isinstance(profile, Profile):
        (model,) = unit
        of_model = requests[model.name]
        how = (order.of(model), order.hints(model.name, of_model)) if order else (fcfs, None)
        run = replay(model.schedule, profile, of_model, timeline=timeline, order=how[0], hints=how[1])
        return {model.name: ModelReplay(run.served, run.preemptions, _moved(run.timeline.spans, model))}
    loads = loads_of(unit, profiles, requests, order)
    rule = rule_of(unit[0].share or Share("time"))
    run_of_unit = replay_unit(loads, rule, CONTENTION, timeline, overhead=overhead_of(unit, profiles), stop=stop)
    spans = {model.name: [s for s in run_of_unit.spans if s.stage == place] for place, model in enumerate(unit)}
    return {
        model.name: ModelReplay(
            run_of_unit.served[model.name],
            run_of_unit.preemptions[model.name],
            _moved(spans[model.name], model),
        )
        for model in unit
    }


def replay_alone(schedule: Schedule, profile: Profile, requests: Items[RequestLengths]) -> RequestTimesColumns:
    """Return the served requests under a schedule with separate devices, in no order.

    The result equals that of `replay`, but is computed many times faster. Raises InputError as `replay` does.
    """
    if not is_compiled(schedule) or schedule.prefix_caching:  # identities of prompts are `replay`'s
        return RequestTimesColumns.of(replay(schedule, profile, requests, timeline=False).served)
    lengths = [(request.input, request.output) for request in requests]
    columns = np.array([(r.arrival_s, r.input, r.output) for r in requests], dtype=np.float64)
    replicas, served = Replicas(profile), []
    for places in deal(lengths, schedule.replicas):
        if not places:
            continue
        arrivals, inputs, outputs = np.ascontiguousarray(columns[places].T)
        times = replicas.serve(schedule, RequestArrays(arrivals, inputs, outputs, np.zeros(len(places))))
        assert times is not None, "no bound ends it"
        served.append((outputs, arrivals, times.started, times.first, times.finished))
    return RequestTimesColumns(*map(np.concatenate, zip(*served, strict=True)))


def _moved(spans: Items[Span], model: PlannedModel) -> tuple[Span, ...]:
    """Return the spans on the plan's devices."""
    where = model.devices
    return tuple(
        Span(where[s.device], s.stage, s.phase, s.micro_batch, s.start_s, s.end_s, s.sequences, s.tokens) for s in spans
    )
