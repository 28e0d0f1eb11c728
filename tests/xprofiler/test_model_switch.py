"""What an iteration takes longer after other models'."""

import time

import pytest

from tests.xcore.small_specs import profile
from tests.xprofiler.test_rates import SPEC
from xcore.specs.profile import Table
from xprofiler.model_switch import switch_seconds


@pytest.mark.parametrize(("colder_s", "expected"), [(0.5, 0.5), (-0.5, 0.0)])
def test_the_difference_of_calls_in_a_row(monkeypatch, colder_s, expected):
    """The first calls of each kind, whose caches change, don't count; nothing is ever negative."""
    now, cold, calls = [0.0], [False], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call():
        warm_ups = 12 if not cold[0] else 6
        changes = calls.count(cold[0]) < warm_ups
        now[0] += 1.0 + cold[0] * colder_s + 10 * changes
        calls.append(cold[0])
        cold[0] = False

    timing = switch_seconds(call, lambda: cold.__setitem__(0, True))
    assert timing.seconds == pytest.approx(expected) and timing.spread == 0.0
    assert calls == [False] * 18 + [True] * 12


def test_a_profile_knows_it_between_its_points_and_not_beyond():
    measured = Table(("bytes",), ((0.0, 100.0, 200.0),), (0.0, 4.0, 6.0))
    knows = profile(SPEC).__class__(**{**vars(profile(SPEC)), "switch": measured})
    assert [knows.switch_seconds(b, 1) for b in (0.0, 50.0, 150.0, 200.0, 1e9)] == [0.0, 2.0, 5.0, 6.0, 6.0]
    assert knows.switch_seconds(100.0, 2) == 2.0, "each device has half of the weights"
    assert profile(SPEC).switch_seconds(100.0, 1) == 0.0
