"""What the recurrences refuse; what they compute is tested where it is used (test_pipeline, test_replay, test_side)."""

import numpy as np
import pytest

from xsimulator.cost import recurrences

Z = np.zeros
RIGHT = {
    "decode_seconds": (np.zeros(2, np.intp), Z(2), Z(3), Z((3, 2)), Z(4), Z(5), Z((4, 5)), Z(6), Z(6), Z((6, 2))),
    "rounds": (Z((5, 2)), Z(5), 3, 1.0),
    "phases": (Z((3, 2)), Z((4, 1, 2)), Z(2), Z(2), Z(4), 2, 2, 9),
    "iterations": (Z((5, 3, 2)), Z(2), Z(3), Z((5, 3, 2)), Z((5, 3, 2))),
    "tandem": (Z((4, 2)), Z(2), Z(4), Z(4), 3),
    "repeated": (Z((4, 3, 2)), Z((4, 3, 2)), Z(4), Z((4, 3)), Z(4), Z((4, 3)), Z((4, 3)), Z(4)),
    "slots": (np.ones(5), Z(5), Z(5), Z(5), *Z((5, 40)), 1.0, 0.0, 0.0, 2),
    "transfers": (np.arange(4), Z(4), Z(4), Z(4), 2, 3),
    "follow": (Z((4, 3, 2)), Z((3, 2)), Z(3), Z(2), Z(2), Z((4, 3, 2)), Z((4, 3, 2)), 0.0, 1.0, False),
}


@pytest.mark.parametrize("name", RIGHT)
def test_arrays_that_do_not_fit_are_refused(name):
    function, right = getattr(recurrences, name), list(RIGHT[name])
    function(*right)
    with pytest.raises(TypeError):
        function(*right[:-1])
    for i, argument in enumerate(right):
        wrong = ["no number"]
        if isinstance(argument, np.ndarray):
            wrong += [argument.astype(np.float32), np.append(argument, argument.dtype.type(0)), None]
        for other in wrong:
            with pytest.raises((TypeError, ValueError, BufferError)):
                function(*right[:i], other, *right[i + 1 :])


def test_places_outside_the_side_are_refused():
    _, *others = RIGHT["decode_seconds"]
    for place in (-1, 2):
        with pytest.raises(ValueError, match="fit together"):
            recurrences.decode_seconds(np.array([0, place]), *others)


@pytest.mark.parametrize("counts", [(0, 1, 9), (2, 0, 9), (2, 2, 0), (-1, 2, 9)])
def test_counts_below_one_are_refused(counts):
    with pytest.raises(ValueError, match="fit together"):
        recurrences.phases(*RIGHT["phases"][:5], *counts)


def test_senders_and_receivers_are_counted_and_items_known():
    order, *columns = RIGHT["transfers"][:4]
    for counts in ((0, 3), (2, 0), (-1, 3)):
        with pytest.raises(ValueError, match="fit together"):
            recurrences.transfers(order, *columns, *counts)
    for place in (-1, 4):
        with pytest.raises(ValueError, match="fit together"):
            recurrences.transfers(np.array([0, 1, 2, place]), *columns, 2, 3)


def test_an_item_waits_for_its_sender_and_its_receiver():
    """Two senders, one receiver: the second item is sent first, and the first one waits for the receiver."""
    arrived = Z(3)
    recurrences.transfers(np.array([1, 0, 2]), np.array([1.5, 1.0, 2.0]), np.array([1.0, 2.0, 4.0]), arrived, 2, 1)
    assert arrived.tolist() == [4.0, 3.0, 8.0]
    recurrences.transfers(np.array([1, 0, 2]), np.array([1.5, 1.0, 2.0]), np.array([1.0, 2.0, 4.0]), arrived, 2, 2)
    assert arrived.tolist() == [2.5, 3.0, 7.0]


def test_a_repeated_iteration_is_the_iteration_many_times():
    """Micro-batches that differ, an iteration of prompts alone, and one with nothing, which waits for all stages."""
    rng = np.random.default_rng(0)
    seconds, hops = rng.uniform(1, 2, (4, 3, 2)), rng.uniform(0, 0.1, (4, 3, 2))
    waits = np.array([[1.0, 0.0, -1.0], [1.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [1.0, -1.0, 1.0]])
    gives, repeats = np.array([1.0, 1.0, 0.0, 1.0]), np.array([1.0, 500.0, 1.0, 90.0])

    def run(rows, repeats):
        firsts, lasts, frees = np.empty((len(rows), 3)), np.empty((len(rows), 3)), np.empty(len(rows))
        cells = (np.ascontiguousarray(a[rows]) for a in (seconds, hops))
        recurrences.repeated(*cells, repeats, waits[rows], gives[rows], firsts, lasts, frees)
        return lasts, frees

    lasts, frees = run(np.arange(4), repeats)
    rows = np.repeat(np.arange(4), repeats.astype(int))
    each_lasts, each_frees = run(rows, np.ones(len(rows)))
    ends = np.cumsum(repeats).astype(int) - 1
    assert frees == pytest.approx(each_frees[ends])
    assert lasts[waits >= 0] == pytest.approx(each_lasts[ends][waits >= 0])


def test_a_slot_is_taken_by_the_next_prompt_as_soon_as_its_sequence_ends():
    """Two slots, one prompt an iteration; the second sequence ends first."""
    starts, ends = np.empty((2, 4))
    iterations, at, prompt, froms, untils = np.empty((5, 40))
    stays = np.array([5.0, 1.0, 2.0, 0.0])
    arrays = (np.ones(4), stays, starts, ends, iterations, at, prompt, froms, untils)
    recurrences.slots(*arrays, 1.0, 0.0, 0.0, 2)
    assert starts.tolist() == ends.tolist() == [0.0, 1.0, 3.0, 6.0]
