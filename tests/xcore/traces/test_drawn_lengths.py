"""Drawn lengths: what is written is what is drawn."""

import numpy as np
import pytest
from scipy import stats

from xcore.errors import InputError
from xcore.traces.trace import parse_workload


def test_lengths_around_a_number_are_all_as_likely():
    workload = parse_workload("2048±512/256")
    assert workload.input.mean == pytest.approx(2048, abs=0.5)
    assert workload.input.std == pytest.approx(1025 / np.sqrt(12), rel=0.005)
    assert workload.output.lengths == (256,) and workload.p99_output == 256
    assert parse_workload("uniform(1,9)/3").input.lengths == tuple(range(1, 10))
    assert parse_workload("10+-2/3").input.lengths == (8, 9, 10, 11, 12)


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("lognormal(1024,0.8)/64", stats.lognorm(0.8, scale=1024)),
        ("lognormal(200,1.5)/64", stats.lognorm(1.5, scale=200)),
        ("normal(500,100)/64", stats.truncnorm(-5, np.inf, 500, 100)),
        ("normal(10,20)/64", stats.truncnorm(-0.5, np.inf, 10, 20)),
    ],
)
def test_quantiles_and_means_are_those_of_the_law(text, law):
    drawn = parse_workload(text).input
    assert drawn.lengths[0] >= 1 and len(drawn.lengths) <= 512
    assert drawn.mean == pytest.approx(law.mean(), rel=0.01, abs=0.6)
    assert drawn.std == pytest.approx(law.std(), rel=0.03, abs=0.6)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert drawn.quantile(share) == pytest.approx(law.ppf(share), rel=0.02, abs=1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("100±200/5", "from -100 to 300"),
        ("uniform(9,3)/5", "from 9 to 3"),
        ("lognormal(0,1)/5", "must be above 0"),
        ("lognormal(1000,20)/5", "one in a million"),
        ("0/5", "must be from 1"),
        ("gamma(1,2)/5", "lognormal"),
    ],
)
def test_what_can_not_be_drawn_is_refused(text, said):
    with pytest.raises(InputError, match=said):
        parse_workload(text)
