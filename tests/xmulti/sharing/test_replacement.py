"""How long a placement stays."""

import pytest

from xmulti.sharing.replacement import LONGEST_S, SHORTEST_S, Performance, next_interval


def test_a_good_estimate_lengthens_the_interval_and_a_bad_one_shortens_it():
    assert next_interval(300.0, 0.05) == pytest.approx(330.0)
    assert next_interval(300.0, 0.1) == pytest.approx(330.0)  # a tie is good
    assert next_interval(300.0, 0.2) == pytest.approx(270.0)
    assert next_interval(SHORTEST_S, 1.0) == SHORTEST_S and next_interval(LONGEST_S, 0.0) == LONGEST_S


def test_the_error_is_the_larger_of_the_two():
    estimate = Performance(0.8, 2.0)
    assert estimate.error(Performance(0.8, 2.0)) == 0
    assert estimate.error(Performance(0.4, 2.2)) == pytest.approx(0.5)
    assert estimate.error(Performance(0.8, 5.0)) == pytest.approx(1.5)
    assert Performance(0.0, 1.0).error(Performance(0.02, 1.0)) == pytest.approx(2.0)  # of a hundredth
