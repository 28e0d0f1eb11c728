"""A unit of several models that serves a server's requests: each model has its own connection to the frontend."""

import select
from collections.abc import Mapping
from dataclasses import replace

from xcore.requests.engine_protocol import Opened
from xcore.requests.request import Request
from xmulti.rank.rank_unit import RankUnit
from xrunner.core.engine import Engine
from xrunner.core.inbox import Inbox, Session


class _Session(Session):
    """One model's requests. Each gets the current time as its arrival: turns go by arrival over all models."""

    def _add(self, request: Request) -> None:
        super()._add(replace(request, arrival_s=self.engine.worker.now()))


def serve(unit: RankUnit, inboxes: Mapping[str, Inbox], opened: Mapping[str, Opened]) -> None:
    """Run the frontend's requests on an open unit until it has drained every model; arguments are by the models' names.

    Raises Gone if the frontend closes a connection early.
    """
    engines: dict[str, Engine] = {tenant.name: tenant.engine for tenant in unit.tenants}
    sessions = [_Session(engine, inboxes[name], opened[name]) for name, engine in engines.items()]
    ran = True  # orders that came with BEGIN are processed at once
    while not all(session.over for session in sessions):
        if not ran:
            _rest(unit, sessions)
        for session in sessions:
            session.take()
        ran = unit.step()
        for session in sessions:
            session.send(session.engine.take())
    for session in sessions:
        session.inbox.finish()
    unit.drain()


def _rest(unit: RankUnit, sessions: list[_Session]) -> None:
    """Wait for orders while nothing can run; only briefly if there are requests."""
    patience_s = min(session.patience_s for session in sessions if not session.over) if unit.idle else 0.0
    if patience_s:
        inboxes = [session.inbox for session in sessions]
        select.select(inboxes, [inbox for inbox in inboxes if inbox.unsent], [], patience_s)
    elif not unit.idle:
        unit.wait()
