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
