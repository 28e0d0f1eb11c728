"""The standard normal, by values that are equally likely."""

import functools
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


@functools.cache
def even_normal(count: int) -> NDArray[np.float64]:
    """[count]: the quantiles in the middle of as many equal shares of a standard normal."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
