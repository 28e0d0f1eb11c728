"""Searches under bounds and at a rate, without a command line."""

from dataclasses import replace

import pytest

from exegpt.api import tuning
from exegpt.api.tuning import TuneProblem, tune_bounds, tune_rate
from exegpt.options.tune import TuneOptions
from xcore import document, processes
from xcore.errors import InputError
from xcore.files import read_schedule
from xcore.processes import Processes
from xcore.specs.bound import ALL_REQUESTS
from xcore.specs.cluster import parse_cluster
from xscheduler.setting_search import SearchOptions, frontier_bounds, infeasible_text, on_cluster, search_schedule
from xscheduler.settings import find_setting

SEARCH = SearchOptions(ALL_REQUESTS, None, None, ("orca", "rra"), "bnb", 0.0)


@pytest.fixture(scope="module")
def problem():
    settings = tuple(find_setting("opt-1.3b", cluster, "T", "roofline") for cluster in ("1xA40", "1xH100-SXM"))
    return TuneProblem(settings, (1e-6, None), SEARCH, TuneOptions(advice=False))


def test_every_bound_has_an_answer_and_the_last_schedule_is_written(problem, tmp_path):
    bounded, unbounded = tune_bounds(
        replace(problem, options=TuneOptions(advice=False, out=tmp_path / "s.json", report=tmp_path / "r.html"))
    )
    assert bounded.tuned.schedule is None and "lowest reachable latency" in infeasible_text(bounded.tuned, 1e-6)
    assert unbounded.bound_s is None and unbounded.tuned.schedule.latency_bound_s is None
    assert read_schedule(tmp_path / "s.json") == unbounded.tuned.schedule
    assert "No schedule" not in (tmp_path / "r.html").read_text()


def test_one_bound_that_nothing_meets_is_named(problem):
    answer = search_schedule(problem.settings[0], None, ttft_s=1e-3, policies=("orca",))
    said = infeasible_text(answer, None)
    assert said.startswith("No schedule meets the requested settings: orca: its lowest time to first token is ")
    assert said.endswith(", over 1 ms.")


def test_the_last_bound_of_a_frontier_is_none(problem):
    bounds_s = frontier_bounds(problem.settings[0], policies=("orca",))
    assert bounds_s[-1] is None and bounds_s[:-1] == sorted(bounds_s[:-1])
    unbounded = search_schedule(problem.settings[0], None, policies=("orca",))
    assert bounds_s[-2] == pytest.approx(unbounded.estimate.latency_s)


def test_offers_come_with_the_cheapest_first_and_a_missing_price_is_refused(problem, tmp_path):
    rated_options = replace(problem, bounds_s=(5.0,), rates_seq_s=(2.0,), prices={"A40": 3.0, "H100-SXM": 1.0})
    rated_options = replace(
        rated_options, search=replace(SEARCH, policies=("orca",)), options=TuneOptions(out=tmp_path / "s.json")
    )
    offers = tune_rate(rated_options)
    assert [offer.price_hour for offer in offers] == [1.0, 3.0] and all(offer.feasible for offer in offers)
    assert document.read_json(tmp_path / "s.json")["cluster"]["name"] == "1xH100-SXM"
    with pytest.raises(InputError, match="no price of H100-SXM"):
        tune_rate(replace(rated_options, prices={"A40": 3.0}))
    with pytest.raises(InputError, match=r"--tolerance 0\.5"):
        tune_rate(replace(rated_options, search=replace(SEARCH, tolerance=0.5)))


def test_many_clusters_are_searched_in_several_processes_with_the_same_answers(problem, monkeypatch):
    """The clusters with most devices come first: they take longest."""
    few = replace(SEARCH, policies=("orca",), fixed={"max_num_seqs": 16, "prefills_per_step": 1})
    settings = tuple(on_cluster(problem.settings[0], parse_cluster(name)) for name in ("1xA40", "2xA40"))
    asked = replace(problem, settings=settings, bounds_s=(5.0,), rates_seq_s=(2.0,), search=few)
    one_by_one = tune_rate(asked)
    begun = []

    class Recorded(Processes):
        def each(self, work, arguments, *rest):
            begun.extend(setting.cluster.name for setting, *_ in arguments)
            return super().each(work, arguments, *rest)

    monkeypatch.setattr(tuning, "WORTH", 2)
    monkeypatch.setattr(processes, "WORTH", 2)
    monkeypatch.setattr(tuning, "Processes", Recorded)
    together = tune_rate(asked)
    assert begun == ["2xA40", "1xA40"]
    assert [offer.setting.cluster.name for offer in together] == ["1xA40", "2xA40"]
    for one, other in zip(one_by_one, together, strict=True):
        assert one.rated.sustained == other.rated.sustained and one.rated.tuned.schedule == other.rated.tuned.schedule
