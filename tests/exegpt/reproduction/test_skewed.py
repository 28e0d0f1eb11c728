"""The distributions of Figure 11 have the moments that they are asked for."""

import itertools

import numpy as np
import pytest

from exegpt.reproduction.figure11 import CHANGES, changed
from exegpt.reproduction.skewed import skewed_normal
from xcore.errors import InputError
from xcore.specs.workload import task

T = task("T")


@pytest.mark.parametrize(("change", "value"), [(change, value) for change in CHANGES for value in CHANGES[change]])
def test_one_moment_changes_and_the_others_stay(change, value):
    distribution = changed(T, change, value).output
    mean, std = T.output.mean, T.output.std
    assert distribution.mean == pytest.approx(mean * value if change == "mean" else mean, rel=1e-4)
    assert distribution.std == pytest.approx(std * value if change == "deviation" else std, rel=1e-4)
    assert distribution.max <= T.output.max


def skewness(distribution):
    return float((distribution.s - distribution.mean) ** 3 @ distribution.p) / distribution.std**3


def test_skewness_rises_and_zero_is_the_tasks_own_distribution():
    distributions = [changed(T, "skewness", value).output for value in CHANGES["skewness"]]
    skews = [skewness(distribution) for distribution in distributions]
    assert all(a < b for a, b in itertools.pairwise(skews))
    parent = distributions[2]
    assert parent.lengths == T.output.lengths
    assert np.abs(parent.p - T.output.p).max() < 1e-6


@pytest.mark.parametrize("skew", [-0.6, -0.4, 0.2, 0.8])
def test_far_from_its_ends_the_distribution_has_the_parents_skewness(skew):
    assert skewness(skewed_normal(500.0, 40.0, 1000, skew)) == pytest.approx(skew, abs=0.01)


def test_moments_that_no_distribution_has():
    with pytest.raises(InputError, match="mean 50 and deviation 60: ask"):
        skewed_normal(50.0, 60.0, 100)
