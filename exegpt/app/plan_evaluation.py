"""What the models of a plan do at their rates, by replays: the same yardstick for every method."""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from exegpt.app.load.arrivals import random_arrivals
from exegpt.app.models_file import Demand
from exegpt.plan import PlannedModel
from exegpt.served import Served, latencies, summarise
from exegpt.workload import RequestLengths

REQUESTS = 1500
"""Of a unit's replay, over all its models."""
LEAST = 50
"""Of each model."""
IN_TIME = 0.99
"""Share of each model's requests that must meet its bound."""
KEEPS_UP = 1.25
"""A rate is sustained if the last request is done within so many times the arrivals' time, and what the first took: a
burst that a loose bound allows is no rate.
"""
HIGHEST, AROUND, PRECISION = 32.0, 1.2, 0.05


def evaluated(unit: Items[PlannedModel], demands: Mapping[str, Demand]) -> list[PlannedModel]:
    """A unit's models with what they do at their rates, and with their goodput: their rates times the largest factor,
    the same for all, at which each meets its bound for 99 % of its requests.
    """
    at_rates = _replayed(unit, demands, 1.0)
    known = min(model.headroom or math.inf for model in unit)
    best = _highest_factor(unit, demands, known)
    found = []
    for model in unit:
        served, rate = at_rates[model.name], model.rate_seq_s
        assert rate is not None, "models that share have rates"
        estimate = summarise(served, max(s.finish_s for s in served), "p99-queries")
        share = in_time(served, demands[model.name].bound_s)
        found.append(replace(model, estimate=estimate, attainment=share, goodput_seq_s=best * rate))
    return found


def in_time(served: Items[Served], bound_s: float | None) -> float:
    """Share of requests within a bound, from arrival."""
    return 1.0 if bound_s is None else float(np.mean(latencies(served, "arrival")["latency"] <= bound_s))


def _highest_factor(unit: Items[PlannedModel], demands: Mapping[str, Demand], known: float) -> float:
    """By bisection on a logarithmic scale, to 5 %, around what a search has found if it has; 0 where not even a 32nd is
    sustained.
    """
    low, high = 1 / HIGHEST, HIGHEST
    if 0 < known < math.inf:
        around = [known / AROUND, known * AROUND]
        low, high = around if _sustained(unit, demands, around[0]) else (low, around[0])
    if low == 1 / HIGHEST and not _sustained(unit, demands, low):
        return 0.0
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _sustained(unit, demands, middle) else (low, middle)
    return low


def _sustained(unit: Items[PlannedModel], demands: Mapping[str, Demand], factor: float) -> bool:
    replays = _replayed(unit, demands, factor)
    for name, served in replays.items():
        last_s, done_s = max(s.arrival_s for s in served), max(s.finish_s for s in served)
        if done_s > KEEPS_UP * last_s + served[0].finish_s or in_time(served, demands[name].bound_s) < IN_TIME:
            return False
    return True


def _replayed(unit: Items[PlannedModel], demands: Mapping[str, Demand], factor: float) -> dict[str, tuple[Served, ...]]:
    """Every model's requests at its rate times a factor, the same requests for every factor."""
    from xsimulator.multimodel.plan_replay import replay_models

    rates = {model.name: model.rate_seq_s or 0.0 for model in unit}
    seconds = REQUESTS / sum(rates.values())
    requests = {
        name: requests_at(demands[name], max(LEAST, round(rate * seconds)), factor) for name, rate in rates.items()
    }
    profiles = {model.name: demands[model.name].setting.profile for model in unit}
    replays = replay_models(unit, profiles, requests)
    return {name: of_model.served for name, of_model in replays.items()}


def requests_at(demand: Demand, count: int, factor: float) -> list[RequestLengths]:
    """So many of a model's requests at its rate times a factor, the same ones for every factor."""
    assert demand.rate_seq_s is not None
    drawn = demand.setting.workload.without_requests.draw(count, 0, demand.setting.model.context)
    arrivals = random_arrivals(factor * demand.rate_seq_s, count, (0,)).tolist()
    return [replace(request, arrival_s=arrival) for request, arrival in zip(drawn, arrivals, strict=True)]
