"""Decoding's keys dealt to programs: every tile once, slots of their own, and as evenly as tiles allow."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exegpt.kernels.work_list import TILE, balance, deal, most_slots

LENGTHS = st.lists(st.integers(1, 40 * TILE), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 70), st.one_of(st.none(), st.integers(1, 5 * TILE)))
def test_every_tile_of_every_sequence_once(lengths, programs, window):
    first_items, items, _, arrived = deal(np.array(lengths, dtype=np.int32), programs, 3, window)
    assert first_items[0] == 0 and (np.diff(first_items) >= 0).all() and len(first_items) == programs + 1
    done = [(s, tile) for s, first, tiles, _ in items[: first_items[-1]] for tile in range(first, first + tiles)]
    seen_from = [0 if window is None else max(0, length - window) for length in lengths]
    spans = zip(seen_from, lengths, strict=True)
    assert done == [(s, t) for s, (a, b) in enumerate(spans) for t in range(a // TILE, -(-b // TILE))]
    assert arrived.shape == (len(lengths), 3) and not arrived.any()


@given(LENGTHS, st.integers(1, 70))
def test_slots_belong_to_split_sequences(lengths, programs):
    first_items, items, first_slots, _ = deal(np.array(lengths), programs, 1)
    used = items[: first_items[-1]]
    for sequence in range(len(lengths)):
        slots = used[used[:, 0] == sequence, 3].tolist()
        begin, end = first_slots[sequence : sequence + 2]
        assert slots == (list(range(begin, end)) if len(slots) > 1 else [-1])
        assert len(slots) > 1 or begin == end
    assert first_slots[0] == 0 and first_slots[-1] <= most_slots(programs)


@given(LENGTHS, st.integers(1, 70))
def test_no_program_has_more_than_its_share(lengths, programs):
    first_items, items, _, _ = deal(np.array(lengths), programs, 1)
    total = sum(-(-length // TILE) for length in lengths)
    tiles = [items[a:b, 2].sum() for a, b in pairwise(first_items)]
    assert sum(tiles) == total and max(tiles) == -(-total // programs)
    assert balance(first_items, items) == pytest.approx(max(tiles) / (total / programs))


@given(LENGTHS, LENGTHS, st.integers(1, 70))
def test_sizes_depend_on_numbers_alone(lengths, others, programs):
    """A graph's buffers hold the list of any lengths."""
    count = min(len(lengths), len(others))
    sizes = [[a.shape for a in deal(np.array(some[:count]), programs, 2)] for some in (lengths, others)]
    assert sizes[0] == sizes[1]
    assert len(deal(np.array(lengths), programs, 2)[1]) >= deal(np.array(lengths), programs, 2)[0][-1]


def test_one_long_sequence_among_short_ones_is_dealt_evenly():
    first_items, items, _, _ = deal(np.array([32768] + [1024] * 63), 49, 8)
    assert balance(first_items, items) < 1.05
    long = items[: first_items[-1]]
    assert (long[:, 0] == 0).sum() >= 16  # a third of all keys, by a third of the programs
