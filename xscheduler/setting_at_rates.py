"""Search the best schedules of a setting at arrival rates, over the numbers of draft tokens too.

The goodput rises with the number up to the best one, and falls beyond it: more draft tokens make an iteration longer
by as much each, and each of them is accepted more rarely. The search climbs from the best number of the steady state.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from xcore.specs.deployment import Deployment
from xcore.specs.schedule import Schedule
from xscheduler.drafts import USUAL, Drafts, search_drafts
from xscheduler.goodput import RateBounds
from xscheduler.open_searches import SearchedAt
from xscheduler.open_tune import Rated, tune_at_rates
from xscheduler.rate_sample import Arrivals
from xscheduler.search import Search
from xscheduler.setting_search import SearchOptions
from xscheduler.settings import Setting


def search_at_rates(
    setting: Setting,
    arrivals: Arrivals,
    bounds: RateBounds,
    rates: tuple[float, ...],
    search: SearchOptions,
    prefix_caching: bool,
    drafts: Drafts | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Rated]:
    """Return the best answers on one cluster, one at each rate."""
    where = setting.model, Deployment(setting.cluster, setting.profile), setting.workload
    options: SearchedAt = {
        "bound": search.bound,
        "policies": search.policies,
        "kv_dtype": setting.kv_dtype,
        "fixed": search.fixed,
        "own": setting.own,
        "admission": search.admission,
        "prefix_caching": prefix_caching,
        "speculation": setting.speculation,
    }

    def tuned(options: SearchedAt, floor: float = 0.0) -> list[Rated]:
        return tune_at_rates(*where, arrivals, bounds, rates, search.method, progress, floor, **options)

    if drafts is None or len(drafts.lengths) == 1:
        return tuned(options)
    steady = search_drafts(setting, bounds.latency_s, drafts, search)
    return tune_drafts(tuned, options, drafts, steady.schedule)


class TuneAt(Protocol):
    """Searches with options, as `tune_at_rates`, and returns the answers at each rate."""

    def __call__(self, options: SearchedAt, floor: float = 0.0) -> list[Rated]:
        """Return the answers; policies far below `floor` requests/s may be left out."""


def tune_drafts(tune: TuneAt, options: SearchedAt, drafts: Drafts, steady: Schedule | None) -> list[Rated]:
    """Return the answers at each rate with the number of draft tokens whose goodput is highest.

    `steady` is the best schedule if requests always wait, with whose number the search begins.
    """
    searches: list[Search] = []

    def answers(drafted: int, floor: float = 0.0) -> list[Rated]:
        answer = tune({**options, "speculation": drafts.at(drafted)}, floor)
        searches.append(answer[0].tuned.search)
        return answer

    usual = USUAL if steady is None else steady.speculation.drafted if steady.speculation else 0
    first = min(drafts.lengths, key=lambda drafted: abs(drafted - usual))
    best_answers = answers(first)
    start = best_answers[0].highest_rate_seq_s
    best, _ = climb(drafts.lengths, first, start, lambda drafted, floor: answers(drafted, floor)[0].highest_rate_seq_s)
    if best != first:
        best_answers = answers(best)
    sums = {name: sum(getattr(s, name) for s in searches) for name in ("evaluations", "space", "seconds", "replays")}

    def with_costs(rated: Rated) -> Rated:
        return replace(rated, tuned=replace(rated.tuned, search=replace(rated.tuned.search, **sums)))

    return [with_costs(rated) for rated in best_answers]


def climb(
    values: tuple[int, ...], first: int, reached: float, measure: Callable[[int, float], float]
) -> tuple[int, float]:
    """Return the value with the highest figure, and the figure, climbing from `first`, which has `reached`.

    `measure` takes a value and the best figure so far. Upwards first; downwards only if that is no better. Where
    `first` reaches nothing, its neighbours may not either: then all values are measured.
    """
    if reached <= 0:
        figures = {first: reached} | {value: measure(value, reached) for value in values if value != first}
        best = max(values, key=figures.__getitem__)
        return best, figures[best]
    start = place = values.index(first)
    for step in (1, -1):
        while 0 <= place + step < len(values) and (figure := measure(values[place + step], reached)) > reached:
            place, reached = place + step, figure
        if place != start:
            break
    return values[place], reached
