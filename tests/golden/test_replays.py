"""The event simulator gives every request the times that it gave: of all policies, on one and on two devices."""

import pytest

from tests.golden.cases import read, replays


def test_replays_are_what_they_were():
    current, golden = replays(), read("replays.json")
    assert list(current) == list(golden)
    for name, rows in golden.items():
        assert current[name] == [pytest.approx(row, rel=1e-9, abs=0) for row in rows], name
