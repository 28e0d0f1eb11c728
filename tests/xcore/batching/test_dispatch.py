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


@given(st.lists(st.sampled_from([(4, 2), (5, 2), (2, 3), (7, 1)]), max_size=60) | st.integers(0, 60), st.integers(1, 5))
def test_the_longer_ones_of_a_row_go_to_the_replicas_with_less_work(lengths, replicas):
    """Ties go by place, whether all requests are alike, some, or none."""
    lengths = [(8, 4)] * lengths if isinstance(lengths, int) else lengths
    loads, expected = [0] * replicas, [[] for _ in range(replicas)]
    for first in range(0, len(lengths), replicas):
        row = sorted(
            range(first, min(first + replicas, len(lengths))), key=lambda place: (-work(lengths, [place]), place)
        )
        takers = sorted(range(replicas), key=lambda replica: (loads[replica], replica))
        for replica, place in zip(takers, row, strict=False):
            expected[replica].append(place)
            loads[replica] += work(lengths, [place])
    assert deal(lengths, replicas) == expected


def test_replicas_end_nearer_to_each_other_than_by_turns():
    draw = random.Random(0)
    differences, by_turns = 0, 0
    for _ in range(50):
        lengths = [(draw.randint(1, 512), draw.randint(1, 80)) for _ in range(64)]
        one, other = (work(lengths, own) for own in deal(lengths, 2))
        differences += abs(one - other)
        by_turns += abs(work(lengths, range(0, 64, 2)) - work(lengths, range(1, 64, 2)))
    assert differences < 0.2 * by_turns
