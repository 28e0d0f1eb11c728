"""The predicted starts of places in the queue."""

import asyncio

import pytest

from tests.xserver.admission.test_admission_control import admission
from xserver.admission.start_table import StartTable, in_order


def test_places_beyond_the_table_repeat_its_last_round():
    """Three sequences run at once and take 5 s: one began 1 s, and one 3 s after the first."""
    starts = [0.0, 1.0, 3.0, 5.0, 6.0, 8.0]
    ordered, round_s = in_order(starts, 3)
    table = StartTable(0.0, tuple(ordered.tolist()), 3, round_s, 0)
    assert [table.start_s(place) for place in range(12)] == [5.0 * (n // 3) + (0.0, 1.0, 3.0)[n % 3] for n in range(12)]


@pytest.mark.parametrize("starts", [[0.0, 2.0, None, None], [None] * 4])
def test_no_place_beyond_the_horizon_has_a_start(starts):
    ordered, round_s = in_order(starts, 2)
    assert round_s is None and ordered.tolist() == [start for start in starts if start is not None]
    assert StartTable(0.0, tuple(ordered.tolist()), 2, round_s, 0).start_s(7) is None


def test_the_first_request_finds_the_table_of_an_idle_engine(monkeypatch):
    made = admission([])
    asyncio.run(made.prepare())
    monkeypatch.setattr(made, "_starts", lambda standing: pytest.fail("computed while a request waits for it"))
    assert made.admit([(100, 50)], 100.0).start_s == 100.0 and made._table.starts_s
