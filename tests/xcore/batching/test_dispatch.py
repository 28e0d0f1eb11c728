"""Requests dealt to replicas: each gets one of every row, and no replica much more to do than another."""

import random

from hypothesis import given
from hypothesis import strategies as st

from xcore.batching.dispatch import OUTPUT_TOKEN, deal

LENGTHS = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 100)), max_size=60)


def work(lengths, places):
    return sum(lengths[place][0] + OUTPUT_TOKEN * lengths[place][1] for place in places)


@given(LENGTHS, st.integers(1, 5))
def test_each_request_once_and_one_of_every_row(lengths, replicas):
    places = deal(lengths, replicas)
    assert len(places) == replicas and sorted(place for own in places for place in own) == list(range(len(lengths)))
    for own in places:
        assert [place // replicas for place in own] == list(range(len(own)))
    assert max(map(len, places)) - min(map(len, places)) <= 1


@given(LENGTHS, st.integers(1, 5))
def test_no_two_replicas_are_further_apart_than_one_request(lengths, replicas):
    loads = [work(lengths, own) for own in deal(lengths, replicas)]
    assert max(loads) - min(loads) <= max((work(lengths, [place]) for place in range(len(lengths))), default=0)


def test_replicas_end_nearer_to_each_other_than_by_turns():
    draw = random.Random(0)
    differences, by_turns = 0, 0
    for _ in range(50):
        lengths = [(draw.randint(1, 512), draw.randint(1, 80)) for _ in range(64)]
        one, other = (work(lengths, own) for own in deal(lengths, 2))
        differences += abs(one - other)
        by_turns += abs(work(lengths, range(0, 64, 2)) - work(lengths, range(1, 64, 2)))
    assert differences < 0.2 * by_turns
