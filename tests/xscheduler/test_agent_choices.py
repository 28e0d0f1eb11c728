"""The choices of a search for agents: spaces by turns per second, and each policy's best of several searches."""

import random
from types import SimpleNamespace

import pytest

from tests.xscheduler.test_rates import FIXED, space_of
from xscheduler.agent_search import KEPT, LATE, PROMISING, SAMPLED, AgentSearch, AgentsTuned, best_of
from xscheduler.list_meter import Played
from xscheduler.search import Search
from xscheduler.ties import TIE
from xscheduler.tuned import Alternative, Tuned

AGENTS, PAUSE_S = 12, 0.5


class Sampled(AgentSearch):
    """A search in which the best point of each space is known; remembers the spaces that were sampled."""

    def _sampled(self, space):
        self.sampled.append(space)
        return self.played.get(space)


def search_of(played):
    sample = SimpleNamespace(mean_pause_s=PAUSE_S, sessions=SimpleNamespace(agents=AGENTS))
    problem = SimpleNamespace(load=SimpleNamespace(workload=FIXED))
    search = Sampled("orca", problem, SimpleNamespace(sample=sample), lambda schedule: schedule, 7)
    search.played, search.sampled = played, []
    return search


def turns_s(space):
    """At the highest throughput, outputs of ten tokens; with all agents, a turn's lowest latency and its pause."""
    return min(space.ceiling / 10, AGENTS / (space.quickest_s + PAUSE_S))


@pytest.mark.parametrize("seed", range(8))
def test_the_spaces_with_the_most_turns_are_sampled_and_those_with_the_best_points_kept(seed):
    rng = random.Random(seed)
    spaces = [space_of(str(i), rng.uniform(50, 150), rng.uniform(0.2, 2.0)) for i in range(12)]
    played = {space: Played(rng.choice([0.0, 0.2, 0.8]), rng.random(), 1.0) for space in spaces[:9]}
    search = search_of(played)
    kept = search._opened(spaces)
    promising = sorted(spaces, key=turns_s)[-PROMISING:]
    assert set(search.sampled) == set(promising) and len(search.sampled) == PROMISING
    assert search.replays == 7 + PROMISING * SAMPLED
    fitting = [space for space in promising if space in played]
    strict = sorted(fitting, key=lambda space: (played[space].excess, played[space].seconds))[:KEPT]
    near = sorted(fitting, key=lambda space: (max(0.0, played[space].excess - LATE), played[space].seconds))[:KEPT]
    assert set(kept) == {*strict, *near} and len(kept) == len(set(kept))
    assert search._opened(spaces) == kept and len(search.sampled) == PROMISING, "once"


def test_few_spaces_are_all_opened_and_without_a_point_that_fits_those_with_the_most_turns():
    two = [space_of("slow", 50.0, 1.0), space_of("fast", 100.0, 1.0)]
    search = search_of({})
    assert search._opened(two) == two[::-1] and not search.sampled and search.replays == 7
    many = [space_of(str(i), 10.0 + i, 1.0) for i in range(12)]
    assert search_of({})._opened(many) == sorted(many, key=turns_s)[: -2 * KEPT - 1 : -1]
    instant = space_of("instant", 90.0)
    instant_search = search_of({})
    instant_search.meter.sample.mean_pause_s = 0.0
    assert instant_search._most_turns(instant) == 9.0


def answer(rates, shares, excess=0.0, evaluations=5):
    alternatives = tuple(
        Alternative(policy, policy if rate else None, SimpleNamespace(throughput_seq_s=rate) if rate else None, "none")
        for policy, rate in rates.items()
    )
    best = max(alternatives, key=lambda a: a.estimate.throughput_seq_s if a.estimate else 0.0)
    tuned = Tuned(best.schedule, best.estimate, alternatives, Search("racing", evaluations, 20, 1.5, 3), None, ())
    return AgentsTuned(tuned, AGENTS, shares, best.schedule, Played(excess, 1.0, 1.0))


def test_each_policy_has_its_best_schedule_of_several_searches():
    one = answer({"orca": 4.0, "rra": 3.0, "static": None}, {"orca": 0.1, "rra": 0.2})
    two = answer({"orca": 2.0, "rra": 3.2, "static": None}, {"orca": 0.3, "rra": 0.4})
    for answers in ((one, two), (two, one)):
        best = best_of(answers)
        assert best.rate_seq_s == 4.0 and best.closest == "orca" and best.cached_shares == {"orca": 0.1, "rra": 0.4}
        rates = [a.estimate and a.estimate.throughput_seq_s for a in best.tuned.alternatives]
        reasons = [a.reason for a in best.tuned.alternatives]
        assert rates == [4.0, 3.2, None]
        assert reasons == [
            "has the highest turn throughput, or as high as any other policy",
            "has 20% fewer turns per second than the best policy",
            "none",
        ]
        cost = best.tuned.search
        assert (cost.evaluations, cost.space, cost.seconds, cost.replays) == (10, 40, 3.0, 6)
    tied = best_of([answer({"orca": 4.0, "rra": 4.0 * (1 - 0.9 * TIE)}, {"orca": 0.1, "rra": 0.2})])
    assert "highest turn throughput" in tied.tuned.alternatives[1].reason


def test_without_a_schedule_the_answer_is_the_one_whose_bounds_are_exceeded_least():
    late, later = (answer({"orca": None}, {}, excess) for excess in (0.5, 0.7))
    for answers in ((late, later), (later, late)):
        assert best_of(answers).played.excess == 0.5
