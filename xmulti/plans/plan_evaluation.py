"""The performance of a plan's models at their rates, by replays of the same requests: the measure for all methods."""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import numpy as np

from xcore.specs.cluster_plan import PlannedModel, units_of
from xcore.specs.request_times import RequestTimes, RequestTimesColumns, summarise_columns
from xcore.specs.workload import RequestLengths
from xmulti.files.models_file import MOST_MODELS
from xmulti.plans.demands import ModelDemand
from xmulti.plans.mean_batch_one_latency import mean_batch_one_latency
from xmulti.sharing.shared_devices import most_of_unit

REQUESTS = 1000
"""Requests of each model with a rate, on average over a plan: all models' requests arrive in the same time."""
LEAST, MOST = 100, 10_000
"""Least and most requests of each model."""
MOST_BESIDE = 4000
"""Most requests of a model whose number is raised because another model on its devices has a lower rate."""
BOUNDS = 3
"""Requests arrive for at least this many times the longest bound."""
BLOCK = 1000
"""Requests that are drawn at once."""
IN_TIME = 0.99
"""Share of each model's requests that must meet its bound."""
KEEPS_UP = 1.25
"""A rate is sustained if the last request is done within this factor of the arrivals' time, plus the first one's.

A burst that a loose bound allows is not a sustained rate.
"""
LEAST_FACTOR, STEP, MOST_STEP, PRECISION = 1 / 64, 1.1, 2.0, 0.01
"""Limits of the search for a factor.

No factor below the first (times the start) is tried. From the start, factors change by a step whose logarithm doubles
up to the third, until a factor is too high, or is not. The last is the precision of the result.
"""
LIKELY = 0.5
"""The search for models that share devices starts at this share of their upper bound."""


@dataclass(frozen=True)
class Drawn:
    """The requests of a model that are replayed."""

    rate_seq_s: float
    seconds: float
    """Seconds in which they arrive at the rate."""
    least_s: float
    """Least seconds of arrivals at any rate.

    A shorter burst may be served in time at a rate that can't be sustained.
    """
    seed: int
    """The model's place in the models file, so that equal models have different requests."""

    def count(self, factor: float) -> int:
        """Return the least number of requests at the rate times a factor: the first ones of an endless list."""
        return min(MOST, max(LEAST, round(self.rate_seq_s * max(self.seconds, factor * self.least_s))))


def drawn(demands: Mapping[str, ModelDemand]) -> dict[str, Drawn]:
    """Return the requests of each model with a rate, the same for any models that share its devices.

    `demands` are those of all the plan's models.
    """
    rates = {name: demand.rate_seq_s for name, demand in demands.items() if demand.rate_seq_s}
    seconds = REQUESTS * len(rates) / sum(rates.values()) if rates else 0.0
    least_s = BOUNDS * max((demands[name].bound_s or 0.0 for name in rates), default=0.0)
    return {name: Drawn(rates[name], seconds, least_s, seed) for seed, name in enumerate(demands) if name in rates}


def in_one_time(counts: Mapping[str, int], rates: Mapping[str, float], most: int) -> dict[str, int]:
    """Return the numbers of requests of models that share devices, so that all arrive in the same period.

    The period is the longest that any of these counts takes at its rate. A model has at most `most` requests, or its
    own count if that is higher. Otherwise a model with a low rate would run alone for most of its requests, which would
    not be late.
    """
    longest_s = max(count / rates[name] for name, count in counts.items())
    seconds = min(longest_s, max(most, *counts.values()) / max(rates.values()))
    return {name: max(1, round(rates[name] * seconds)) for name in counts}


@dataclass(eq=False)
class Misses:
    """Shows during a replay that a rate isn't sustained: too many requests are late, or the last one comes too late."""

    requests: Mapping[str, Items[RequestLengths]]
    bounds_s: Mapping[str, float | None]
    _late: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)

    def __call__(self, served: Mapping[str, Items[RequestTimes]], now: float) -> bool:
        """Return whether a rate isn't sustained; see `xmulti.sharing.replay.Stop`."""
        return any(self._too_many(name, of_model, now) for name, of_model in served.items())

    def _too_many(self, name: str, served: Items[RequestTimes], now: float) -> bool:
        count, bound_s, seen = len(self.requests[name]), self.bounds_s[name], self._seen.get(name, 0)
        if bound_s is not None and len(served) > seen:
            late = sum(one.finish_s - one.arrival_s > bound_s for one in served[seen:])
            self._late[name], self._seen[name] = self._late.get(name, 0) + late, len(served)
        if (count - self._late.get(name, 0)) / count < IN_TIME:
            return True
        last_s = self.requests[name][-1].arrival_s
        return 0 < len(served) < count and now > KEEPS_UP * last_s + served[0].finish_s


@dataclass(frozen=True, eq=False)
class Trial:
    """The models of a unit, or of several that are joined by replicas, with the requests that are replayed."""

    unit: Items[PlannedModel]
    demands: Mapping[str, ModelDemand]
    drawn: Mapping[str, Drawn]
    turns: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The replica's index and the number of replicas, of models whose other replicas aren't replayed.

    The replica gets the requests that it would get if all replicas took turns.
    """
    _sustained: dict[float, bool] = field(default_factory=dict, repr=False)
    _requests: dict[str, list[RequestLengths]] = field(default_factory=dict, repr=False)

    def requests(self, name: str, factor: float) -> list[RequestLengths]:
        """Return a model's requests at its rate times a factor; a factor changes only their number and arrivals."""
        count, known = self._counts(factor)[name], self._requests.setdefault(name, [])
        while len(known) < count:
            known += self._block(name, len(known))
        turn, replicas = self.turns.get(name, (0, 1))
        return [RequestLengths(own.input, own.output, own.arrival_s / factor) for own in known[turn:count:replicas]]

    def _counts(self, factor: float) -> dict[str, int]:
        asked = {model.name: self.drawn[model.name] for model in self.unit}
        rates = {name: own.rate_seq_s for name, own in asked.items()}
        return in_one_time({name: own.count(factor) for name, own in asked.items()}, rates, MOST_BESIDE)

    def _block(self, name: str, number: int) -> list[RequestLengths]:
        """Return the next requests after the first `number`, at the model's rate."""
        demand, asked = self.demands[name], self.drawn[name]
        seed = asked.seed + MOST_MODELS * (number // BLOCK)
        lengths = demand.setting.workload.without_requests.draw(BLOCK, seed, demand.setting.model.longest_request)
        gaps = np.random.default_rng([seed, 1]).exponential(1 / asked.rate_seq_s, BLOCK)
        before_s = self._requests[name][-1].arrival_s if number else -gaps[0]
        arrivals = (before_s + np.cumsum(gaps)).tolist()
        return [RequestLengths(own.input, own.output, time) for own, time in zip(lengths, arrivals, strict=True)]

    def sustained(self, factor: float) -> bool:
        """Return whether all requests are served in time at the models' rates times a factor."""
        if factor not in self._sustained:
            self._sustained[factor] = self._all_in_time(factor)
        return self._sustained[factor]

    def _all_in_time(self, factor: float) -> bool:
        requests = {model.name: self.requests(model.name, factor) for model in self.unit}
        for name, served in self._run(requests, Misses(requests, self._bounds_s)).items():
            if len(served.finish_s) < len(requests[name]):
                return False  # the replay ended early
            last_s, done_s, first_s = served.arrival_s.max(), served.finish_s.max(), served.finish_s.min()
            bound_s = self.demands[name].bound_s
            if done_s > KEEPS_UP * last_s + first_s or _share_in_time(served, bound_s) < IN_TIME:
                return False
        return True

    def highest(self, start: float) -> float:
        """Return the highest factor that is sustained, to `PRECISION`.

        Return 0 if not even `LEAST_FACTOR` times the start is sustained.
        """
        low, high, step = 0.0, math.inf, STEP
        factor, least = start, LEAST_FACTOR * start
        while not (low and high < math.inf):
            if self.sustained(factor):
                low, factor = factor, factor * step
            elif factor <= least:
                return 0.0
            else:
                high, factor = factor, max(factor / step, least)
            step = min(step * step, MOST_STEP)
        while high > low * (1 + PRECISION):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.sustained(middle) else (low, middle)
        return low

    @property
    def _bounds_s(self) -> dict[str, float | None]:
        return {model.name: self.demands[model.name].bound_s for model in self.unit}

    def replayed(self, factor: float) -> dict[str, RequestTimesColumns]:
        """Return the served requests of every model at its rate times a factor."""
        return self._run({model.name: self.requests(model.name, factor) for model in self.unit}, None)

    def _run(
        self, requests: Mapping[str, Items[RequestLengths]], stop: Misses | None
    ) -> dict[str, RequestTimesColumns]:
        """Return the served requests of every model.

        If a replay of shared devices stops early, these are the requests served so far.
        """
        from xmulti.sharing.plan_replay import replay_alone, replay_joined

        profiles = {model.name: self.demands[model.name].setting.profile for model in self.unit}
        if len(self.unit) == 1 and self.unit[0].share is None:
            (model,) = self.unit
            return {model.name: replay_alone(model.schedule, profiles[model.name], requests[model.name])}
        runs = replay_joined(units_of(self.unit), lambda model: profiles[model.name], requests, stop=stop)
        return {name: RequestTimesColumns.of(run.served) for name, run in runs.items()}


def evaluated(
    unit: Items[PlannedModel],
    demands: Mapping[str, ModelDemand],
    asked: Mapping[str, Drawn] | None = None,
    level: float = 0.0,
) -> list[PlannedModel]:
    """Return the models of a unit, or of joined units, with their performance at their rates, and their goodput.

    The goodput is their rates times the largest factor, the same for all, at which each meets its bound for 99 % of its
    requests. `demands` are all of the plan's models, unless the requests are given. If the factor is below `level`, its
    value doesn't matter and is 0.
    """
    trial = Trial(unit, demands, asked or drawn(demands))
    if level and not trial.sustained(level):
        return [replace(model, goodput_seq_s=0.0) for model in unit]
    start = level or min(model.headroom or 1.0 for model in unit)
    if unit[0].share and not level and len(units_of(unit)) == 1:
        whose = [demands[model.name] for model in unit]
        start = LIKELY * most_of_unit(whose, whose[0].setting.cluster, len(unit[0].devices)) or start
    return at_rates(trial, trial.highest(start))


def at_rates(trial: Trial, factor: float) -> list[PlannedModel]:
    """Return the models with their performance at their rates, and with a goodput of `factor` times these."""
    served, found = trial.replayed(1.0), []
    for model in trial.unit:
        assert model.rate_seq_s is not None, "it has been replayed at its rate"
        estimate = summarise_columns(served[model.name], float(served[model.name].finish_s.max()))
        share = _share_in_time(served[model.name], trial.demands[model.name].bound_s)
        alone_s = mean_batch_one_latency(trial.demands[model.name].setting, trial.requests(model.name, 1.0))
        latency_s = float(served[model.name].latencies("arrival")["latency"].mean())
        normalised, goodput = latency_s / alone_s if alone_s else None, factor * model.rate_seq_s
        reached = replace(model, estimate=estimate, goodput_seq_s=goodput, attainment=share)
        found.append(replace(reached, normalised_latency=normalised))
    return found


def in_time(served: Items[RequestTimes], bound_s: float | None) -> float:
    """Return the share of requests within a bound, from arrival."""
    return _share_in_time(RequestTimesColumns.of(served), bound_s)


def _share_in_time(served: RequestTimesColumns, bound_s: float | None) -> float:
    return 1.0 if bound_s is None else float(np.mean(served.latencies("arrival")["latency"] <= bound_s))
