"""The standard normal distribution as equally likely values."""

import functools
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


@functools.cache
def even_normal(count: int) -> NDArray[np.float64]:
    """Return `count` equally likely values of a standard normal: the middle quantiles of equal shares."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
