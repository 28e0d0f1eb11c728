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
from xscheduler.expert_divisions import divisions
from xscheduler.goodput import RateBounds
from xscheduler.open_searches import SearchedAt
from xscheduler.open_tune import Rated, tune_at_rates
from xscheduler.rate_sample import Arrivals
from xscheduler.search import Search, total
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
        "divisions": divisions(setting),
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
    whole: dict[int, list[Rated]] = {}
    """The answers of searches without a floor."""

    def answers(drafted: int, floor: float = 0.0) -> list[Rated]:
        answer = tune({**options, "speculation": drafts.at(drafted)}, floor)
        searches.append(answer[0].tuned.search)
        if not floor:
            whole[drafted] = answer
        return answer

    usual = USUAL if steady is None else steady.speculation.drafted if steady.speculation else 0
    best, _ = drafts.best(lambda drafted, floor: answers(drafted, floor)[0].highest_rate_seq_s, usual)
    best_answers = whole.get(best) or answers(best)
    cost = total(searches)
    return [replace(rated, tuned=replace(rated.tuned, search=cost)) for rated in best_answers]
