"""The number of draft tokens at a rate: the climb against trying all, and the answers that it gives."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xcore.small_specs import schedule
from xcore.specs.bound import ALL_REQUESTS
from xscheduler import setting_at_rates
from xscheduler.drafts import Drafts, climb
from xscheduler.goodput import RateBounds
from xscheduler.open_tune import Rated
from xscheduler.rate_sample import Arrivals
from xscheduler.search import Search
from xscheduler.setting_at_rates import search_at_rates, tune_drafts
from xscheduler.setting_search import SearchOptions
from xscheduler.settings import find_setting
from xscheduler.tuned import Tuned


@given(st.lists(st.integers(1, 100), min_size=1, max_size=9, unique=True), st.data())
def test_a_climb_finds_the_highest_of_figures_that_rise_and_fall(figures, data):
    top = figures.index(max(figures))
    one_peak = [*sorted(figures[:top]), figures[top], *sorted(figures[top + 1 :], reverse=True)]
    values = tuple(range(len(one_peak)))
    first, asked = data.draw(st.sampled_from(values)), []

    def measure(value, reached):
        asked.append(value)
        assert reached >= one_peak[first]
        return one_peak[value]

    assert climb(values, first, one_peak[first], measure) == (top, max(figures))
    assert len(asked) == len(set(asked)) <= abs(top - first) + 2


def test_where_the_first_value_reaches_nothing_all_are_measured():
    figures = (0.0, 0.0, 0.0, 0.0, 7.0, 0.0)
    assert climb(tuple(range(6)), 1, 0.0, lambda value, reached: figures[value]) == (4, 7.0)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rate", [0.5, 8.0])
def test_no_other_number_of_draft_tokens_sustains_more(rate):
    setting = find_setting("opt-6.7b", "1xA40", "256/64", "roofline", one_engine=True)
    drafts = Drafts.of("0.7", None, None, None)
    assert drafts.lengths == tuple(range(9))
    arrivals, bounds = Arrivals.poisson(setting.workload, 2048, count=4000), RateBounds(None, 1.0, 0.1)
    search = SearchOptions(ALL_REQUESTS, bounds.ttft_s, bounds.tpot_s, ("chunked",), "bnb", 0.0)
    (found,) = search_at_rates(setting, arrivals, bounds, (rate,), search, False, drafts)

    def highest(drafted):
        own = replace(setting, speculation=drafts.at(drafted))
        return search_at_rates(own, arrivals, bounds, (rate,), search, False)[0].highest_rate_seq_s

    every = {drafted: highest(drafted) for drafted in drafts.lengths}
    assert found.highest_rate_seq_s == max(every.values())
    (best,) = found.sustained.values()
    assert every[best.schedule.speculation.drafted if best.schedule.speculation else 0] == max(every.values())


def rated(goodput, drafted):
    """The answer of a search for one policy; its search cost tells the number of draft tokens."""
    sustained = {"orca": SimpleNamespace(goodput_seq_s=goodput)} if goodput else {}
    search = Search("racing", 2, 10, 0.5, drafted)
    return [Rated(Tuned(None, None, (), search, None, ()), rate, sustained) for rate in (1.0, 2.0)]


@given(st.lists(st.integers(1, 100), min_size=9, max_size=9, unique=True), st.integers(0, 8), st.sampled_from([0, 3]))
def test_the_answers_are_those_of_the_best_number_of_draft_tokens(figures, top, usual):
    """Beside all numbers; searches of the others may leave out what is below the best so far."""
    peak = sorted(figures)
    goodputs = [*peak[:top], peak[-1], *reversed(peak[top:-1])]
    drafts, asked = Drafts.of("0.7", None, None, None), []

    def tune(options, floor=0.0):
        drafted = options["speculation"].drafted if options["speculation"] else 0
        asked.append(drafted)
        assert options["policies"] == ("orca",) and 0 <= floor <= max(goodputs[n] for n in asked)
        return rated(goodputs[drafted] * (goodputs[drafted] >= floor), drafted)

    steady = None if usual else replace(schedule("orca"), speculation=None)
    found = tune_drafts(tune, {"policies": ("orca",)}, drafts, steady)
    assert [answer.rate_seq_s for answer in found] == [1.0, 2.0]
    assert all(answer.highest_rate_seq_s == max(goodputs) for answer in found)
    assert asked[0] == usual and max(asked.count(n) for n in asked) <= 2
    for answer in found:
        cost = answer.tuned.search
        assert (cost.evaluations, cost.replays) == (2 * len(asked), sum(asked))


def test_a_search_at_rates_has_the_options_of_the_setting(monkeypatch):
    setting = find_setting("opt-1.3b", "1xA40", "128/32", "roofline", engine="vllm", kv_dtype="fp16")
    asked = []

    def tune_at_rates(*arguments, **options):
        asked.append((arguments, options))
        return rated(1.0, 0)

    monkeypatch.setattr(setting_at_rates, "tune_at_rates", tune_at_rates)
    arrivals, bounds = Arrivals.poisson(setting.workload, 2048, count=40), RateBounds(9.0)
    search = SearchOptions(ALL_REQUESTS, None, None, ("orca",), "bnb", 0.0)
    for drafts in (None, Drafts.of("0.7", "2", None, None)):
        search_at_rates(setting, arrivals, bounds, (1.0, 2.0), search, True, drafts)
        (model, on, workload, *rest), options = asked.pop()
        assert (model, on.cluster, on.profile, workload) == (
            setting.model,
            setting.cluster,
            setting.profile,
            setting.workload,
        )
        assert rest[:4] == [arrivals, bounds, (1.0, 2.0), "bnb"] and rest[5] == 0.0
        assert options["prefix_caching"] and options["own"] is setting.own is not None
        assert options["policies"] == ("orca",) and options["kv_dtype"] == setting.kv_dtype and not asked
