"""Requests dealt to replicas: each gets one of every row, and no replica much more to do than another."""

import random

from hypothesis import given
from hypothesis import strategies as st

from exegpt.policies import deal


@given(st.lists(st.integers(2, 600), max_size=60), st.integers(1, 5))
def test_each_request_once_and_one_of_every_row(tokens, replicas):
    places = deal(tokens, replicas)
    assert len(places) == replicas and sorted(place for own in places for place in own) == list(range(len(tokens)))
    for own in places:
        assert own == sorted(own)
        assert [place // replicas for place in own] == list(range(len(own)))
    assert max(map(len, places)) - min(map(len, places)) <= 1


@given(st.lists(st.integers(2, 600), min_size=1, max_size=60), st.integers(1, 5))
def test_no_two_replicas_are_further_apart_than_two_requests(tokens, replicas):
    """A row brings the loads no further apart than its own lengths are, or the loads were."""
    loads = [sum(tokens[place] for place in own) for own in deal(tokens, replicas)]
    assert max(loads) - min(loads) <= max(tokens)


def test_replicas_end_nearer_to_each_other_than_by_turns():
    tokens = [random.Random(seed).randint(1, 600) for seed in range(64)]
    loads = [sum(tokens[place] for place in own) for own in deal(tokens, 2)]
    by_turns = [sum(tokens[replica::2]) for replica in range(2)]
    assert abs(loads[0] - loads[1]) < 0.2 * abs(by_turns[0] - by_turns[1])
