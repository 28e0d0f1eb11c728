"""Models that share a device, at their frontends' requests."""

import select
import socket
from types import SimpleNamespace

from tests.xmulti.rank.test_shared_unit import planned
from tests.xrunner.cells import requests
from xcore.requests.engine_protocol import BEGIN, DRAIN, FROM_ENGINE, Frames, Stepped, framed
from xcore.specs.cluster_plan import Share
from xmulti.rank.rank_unit import RankUnit
from xmulti.serving import serving_unit
from xrunner.core.inbox import Inbox


def test_requests_that_come_as_engines_begin_wait_for_nothing(directories, monkeypatch):
    """As after a restart, when all that has not ended comes again at once."""
    rests = []

    def rest(*waiting):
        rests.append(waiting[-1])
        return select.select(*waiting)

    monkeypatch.setattr(serving_unit, "select", SimpleNamespace(select=rest))
    unit = RankUnit.load(planned(directories, Share("time"), 30), directories)
    unit.open()
    ours, inboxes = {}, {}
    for name in directories:
        ours[name], theirs = socket.socketpair()
        inboxes[name] = Inbox(theirs)
        ours[name].sendall(b"".join(map(framed, (BEGIN, requests()[3], DRAIN))))
    serving_unit.serve_unit(unit, inboxes, dict.fromkeys(directories, "opened"))
    assert rests == []
    for name, one in ours.items():
        messages = Frames(FROM_ENGINE).feed(one.recv(2**20))
        ended = [end.reason for message in messages if isinstance(message, Stepped) for end in message.ended]
        assert len(ended) == 1, name
        one.close()
        inboxes[name].close()
