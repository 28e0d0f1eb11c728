"""What an administrator may do over HTTP: change the schedule, and drain the server."""

import hmac
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from exegpt import document
from exegpt.errors import InputError
from exegpt.policies import checked
from exegpt.schedule import Schedule
from exegpt.server.body import read_json
from exegpt.server.errors import ApiError, invalid
from exegpt.server.frontend import Frontend
from exegpt.server.frontends import Frontends
from exegpt.server.gate import hashed
from exegpt.server.openapi import Description
from exegpt.server.responses import Accepted, Draining
from exegpt.server.schemas import ScheduleToFollow

MAX_BODY = 2**22
"""Bytes: a schedule has the distributions of the lengths."""


def add_administration(api: FastAPI, described: Description, frontends: Frontends) -> None:
    """The routes, where there is an administrator's token."""
    if frontends.admin is None:
        return

    @api.post(
        "/schedule",
        summary="Let a model follow another schedule, of as many devices.",
        **described.administration(Accepted, ScheduleToFollow),
    )
    async def schedule(request: Request, model: str | None = None) -> Response:
        check_token(request, frontends.admin)
        asked = _schedule(await read_json(request, MAX_BODY))
        frontend = frontends.of(model)
        frontend.check_ready()
        _check_follows(asked, frontend)
        frontend.link.follow(asked)
        return JSONResponse({"accepted": True}, 202)

    @api.post(
        "/drain",
        summary="End the server when all accepted requests are answered.",
        **described.administration(Draining),
    )
    async def drain(request: Request) -> Response:
        check_token(request, frontends.admin)
        frontends.drain()
        return JSONResponse({"draining": True}, 202)


def check_token(request: Request, admin: bytes | None) -> None:
    """ApiError without the administrator's token, whose hash is `admin`; it comes beside an API key: in a header of its
    own.
    """
    given = hashed(request.headers.get("x-admin-token", ""))
    if admin is None or not hmac.compare_digest(given, admin):
        raise ApiError(401, "The administrator's token is missing or wrong: send X-Admin-Token.", "invalid_api_key")


def _schedule(data: Any) -> Schedule:
    """The schedule of a body."""
    try:
        schedule = checked(document.from_dict(Schedule, data, "The schedule"))
        schedule.check_stages()
    except InputError as error:
        raise invalid(str(error)[:500]) from None
    return schedule


def _check_follows(schedule: Schedule, frontend: Frontend) -> None:
    """ApiError for a schedule that the model's engine can't follow."""
    if frontend.shares:
        raise invalid(f"The model shares its devices with {', '.join(frontend.shares)}: its schedule is the plan's.")
    assert frontend.link.opened, "an engine that has opened"
    held = frontend.link.opened.schedule
    try:
        schedule.check_model(held.model.spec)
    except InputError as error:
        raise invalid(str(error)[:500]) from None
    need, have = _devices(schedule), _devices(held)
    if need != have or schedule.dtype != held.dtype:
        raise invalid(
            f"The schedule is for {need} devices in {schedule.dtype}, and the engine has {have} in {held.dtype}."
        )


def _devices(schedule: Schedule) -> int:
    return sum(stage.tp for stage in schedule.stages) * schedule.replicas
