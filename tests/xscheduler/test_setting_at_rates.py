"""The number of draft tokens at a rate: the climb against trying all, and the answers that it gives."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.specs.bound import ALL_REQUESTS
from xscheduler.drafts import Drafts, climb
from xscheduler.goodput import RateBounds
from xscheduler.rate_sample import Arrivals
from xscheduler.setting_at_rates import search_at_rates
from xscheduler.setting_search import SearchOptions
from xscheduler.settings import find_setting


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
