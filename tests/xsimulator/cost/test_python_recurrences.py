"""The recurrences in Python against the compiled ones: equal to the last bit, and refusing the same arrays."""

import numpy as np
import pytest

from tests.python_version import python_version
from tests.xsimulator.cost.test_recurrences import RIGHT
from xsimulator.cost import recurrences

PYTHON = python_version("xsimulator.cost.recurrences")


def drawn(seed):
    """Random arguments of each function, and the places of those that it writes."""
    rng = np.random.default_rng(seed)
    n, m, s = (int(size) for size in rng.integers(1, 6, 3))

    def some(*shape):
        return rng.uniform(0, 2, shape)

    cells, hops, room = some(n, m, s), some(m, s) / 10, np.zeros((n, m, s))
    joins, most, variants = int(rng.integers(1, m + 1)), (1, 2, 30)[seed % 3], (m, 1)[seed % 2]
    waits, gives = (rng.integers(low, 2, size).astype(float) for low, size in ((-1, (n, m)), (0, n)))
    lengths, stays = rng.integers(1, 100, 4 * n).astype(float), rng.integers(0, 20, 4 * n).astype(float)
    chunks = np.zeros(((300, 9)[seed % 2],))
    grid = [np.cumsum(some(size)) for size in (n, m, s)]
    places, queries = rng.permutation(5)[:m].astype(np.intp), 4 * some(2, 6)
    rest, attention = some(n, len(places)), some(m, s)
    cost = (places, some(len(places)), grid[0], rest, grid[1], grid[2], attention, queries[0], queries[1])
    yield "follow", (cells, hops, some(m), some(s), some(s), room, room + 1, 1.0, 4.0, bool(seed % 2))
    yield "phases", (some(seed % 4, s), some(n, variants, s), hops[0], hops[-1], np.zeros(n), m, joins, most)
    yield "iterations", (cells, hops[0], some(m), room, room + 1)
    yield "tandem", (cells[:, 0].copy(), hops[0], np.zeros(n), np.zeros(n), m)
    repeats = rng.integers(1, 50, n).astype(float)
    yield "repeated", (cells, some(n, m, s), repeats, waits, gives, np.zeros((n, m)), np.zeros((n, m)), np.zeros(n))
    slots = (lengths, stays, np.zeros(4 * n), np.zeros(4 * n), *(chunks.copy() for _ in range(5)))
    yield "slots", (*slots, 20.0 + seed % 50, 1.0, float(seed % 3), 1 + seed % 7)
    yield "transfers", (rng.permutation(n * m), some(n * m), some(n * m), np.zeros(n * m), 1 + seed % 3, s)
    yield "mixture_quantile", (50 * some(n), some(n), rng.dirichlet(np.ones(n)), 0.97)
    yield "rounds", (cells[:, 0].copy(), np.zeros(n), 3.0, 0.5)
    yield "decode_seconds", (*cost, np.zeros((6, 5)))


@pytest.mark.parametrize("seed", range(60))
def test_python_computes_what_is_compiled(seed):
    for name, arguments in drawn(seed):
        own = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        result = getattr(recurrences, name)(*arguments)
        assert getattr(PYTHON, name)(*own) == result, name
        if name != "slots" or result[0]:
            assert all(np.array_equal(a, b) for a, b in zip(own, arguments, strict=True)), name


@pytest.mark.parametrize("name", RIGHT)
def test_python_refuses_arrays_that_do_not_fit(name):
    function, right = getattr(PYTHON, name), list(RIGHT[name])
    function(*right)
    for i, argument in enumerate(right):
        wrong = ["no number"]
        if isinstance(argument, np.ndarray):
            wrong += [argument.astype(np.float32), np.append(argument, argument.dtype.type(0)), None]
        for other in wrong:
            with pytest.raises((TypeError, ValueError, BufferError)):
                function(*right[:i], other, *right[i + 1 :])
