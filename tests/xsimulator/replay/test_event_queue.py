"""The event queue: who acts when, and who may submit in between."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsimulator.replay.event_queue import events, run


class Script:
    """Acts at given times, and notes it."""

    def __init__(self, name, times, log):
        self.name, self.times, self.log = name, sorted(times), log
        self.stuck = False

    @property
    def idle(self):
        return not self.times and not self.stuck

    def next_event(self):
        return self.times[0] if self.times else inf

    def act(self, now):
        assert now == self.times.pop(0)
        self.log.append((now, self.name))


TIMES = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4)


@given(TIMES, st.sampled_from([0, 4, inf]))
def test_events_come_by_time_and_at_the_same_time_by_place(times, until):
    log = []
    actors = [Script(place, own, log) for place, own in enumerate(times)]
    told = list(events(actors, until))
    expected = sorted((time, place) for place, own in enumerate(times) for time in own if time <= until)
    assert log == expected and told == [time for time, _ in expected]
    assert [actor.times for actor in actors] == [sorted(t for t in own if t > until) for own in times]


def test_what_is_submitted_after_an_event_happens_in_its_turn():
    log = []
    first, second = Script("a", [1, 5], log), Script("b", [], log)
    for _ in events([first, second]):
        if log == [(1, "a")]:
            second.times = [1, 3]
    assert log == [(1, "a"), (1, "b"), (3, "b"), (5, "a")]


def test_what_waits_for_ever_is_an_error_unless_a_time_ends_it():
    stuck = Script("a", [1], [])
    stuck.stuck = True
    with pytest.raises(RuntimeError, match="can never be admitted"):
        run([stuck])
    run([stuck], until=3.0)
