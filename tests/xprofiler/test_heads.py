"""Attention of heads that were not measured."""

import numpy as np
import pytest

from xcore.errors import InputError
from xcore.specs.profile import Table
from xprofiler.heads import table_for

BATCHES, LENGTHS = (1.0, 2.0, 4.0, 8.0), (1.0, 100.0, 1000.0)


def measured(heads, kv_heads, filled=None):
    """Time in proportion to sequences, KV heads and tokens, and a little more for every query head."""
    b, s = np.meshgrid(BATCHES, LENGTHS, indexing="ij")
    seconds = b * s * (kv_heads + 0.1 * heads)
    return Table(("batch", "context"), (BATCHES, LENGTHS), tuple(seconds.ravel().tolist()), filled=filled)


TABLES = {pair: measured(*pair) for pair in ((1, 1), (2, 2), (8, 8), (24, 4), (32, 4))}


def test_measured_heads_are_taken_as_they_are():
    assert table_for(TABLES, 24, 4) is TABLES[24, 4]


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (5, 5), (96, 16), (28, 4), (56, 8)])
def test_more_heads_are_more_sequences_and_between_heads_is_linear(heads, kv_heads):
    tables = table_for(TABLES, heads, kv_heads)
    assert tables.points[0][0] <= 1.0
    b, s = np.array([1.0, 1.3]), np.array([500.0, 70.0])
    np.testing.assert_allclose(tables(b, s), b * s * (kv_heads + 0.1 * heads))


def test_what_was_filled_stays_so():
    last = len(BATCHES) * len(LENGTHS) - 1
    tables = table_for({(8, 8): measured(8, 8, filled=(0, last))}, 16, 16)
    assert tables.points[0] == (1.0, 2.0, 4.0)
    assert tables.filled == (len(tables.values) - 1,)


def test_heads_outside_the_tables_are_refused_with_those_in_them():
    with pytest.raises(InputError, match=r"40 heads and 4 KV heads.*ones are 1/1, 2/2, 8/8, 24/4, 32/4"):
        table_for(TABLES, 40, 4)
