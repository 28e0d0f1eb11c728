"""What drivers of several replicas send each other: who has nothing to run takes what comes at once."""

import pytest

from tests.xrunner.cells import requests
from xcore.requests.request import Request, Result
from xrunner.core import replicas
from xrunner.core.replicas import Follower, Leader
from xrunner.rank.worker import END


class FakeTransport:
    """Messages that arrive at the given polls, counted from 1."""

    def __init__(self, **arrivals):
        self.arrivals = {int(poll.strip("_")): message for poll, message in arrivals.items()}
        self.polls = 0

    def poll(self, source=None, tag=None):
        self.polls += 1
        return self.arrivals.pop(self.polls, None)

    def post(self, message, *to, tag=None):
        pass

    def wait(self, poll):
        while not (found := poll()):
            assert self.polls < 100, "it waits though something has come"
        return found


@pytest.fixture(autouse=True)
def endless(monkeypatch):
    """Only what comes ends a wait."""
    monkeypatch.setattr(replicas, "_LOOK_S", 1e9)


def result(name):
    return Result(name, 1, (2,), "length", 0.0, 0.0, 0.0, 0.0)


def test_a_leader_wakes_when_another_replica_has_something():
    events = []
    leader = Leader(FakeTransport(_3=[result("a")]), (1,), events.append)
    leader.give((0, requests()[0]), 1)
    leader.wait()
    assert [event.id for event in events] == ["a"] and leader.outstanding == 0
    assert not leader.over


def test_a_leader_drains_until_the_last_replica_has_ended():
    events = []
    leader = Leader(FakeTransport(_2=END, _4=[result("a")], _7=END), (1, 2), events.append)
    leader.drain()
    assert leader.over and [event.id for event in events] == ["a"]


def test_a_follower_wakes_when_an_order_comes_and_loses_none():
    first, second = requests()[:2]
    assert isinstance(first, Request)
    follower = Follower(FakeTransport(_3=(0, first), _4=(1, second), _6="aborted"), 0)
    follower.wait()
    assert follower.orders() == [(0, first), (1, second)]
    assert follower.orders() == ["aborted"] and follower.orders() == []
