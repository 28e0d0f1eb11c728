"""Administration over HTTP: change the schedule or the plan, and drain the server."""

import hmac
import reprlib

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from xcore import document
from xcore.errors import InputError
from xcore.policies.from_schedule import checked
from xcore.specs.cluster_plan import Plan
from xcore.specs.schedule import Schedule
from xserver.admission.gate import hashed
from xserver.http.api_error import ApiError, invalid
from xserver.http.body import read_json
from xserver.http.frontend import Frontend
from xserver.http.frontends import Frontends
from xserver.http.openapi import Description
from xserver.http.responses import Accepted, Draining
from xserver.http.schemas import PlanToFollow, ScheduleToFollow

MAX_BODY = 2**22
"""Maximum bytes of a schedule, which contains the distributions of the lengths."""
MAX_PLAN = 2**24
"""Maximum bytes of a plan, which contains a schedule of each model."""
_DIGITS = 6
"""Maximum digits of a replica's number."""


def add_administration(api: FastAPI, described: Description, frontends: Frontends) -> None:
    """Add the routes, if there is an administrator's token."""
    if frontends.admin is None:
        return

    @api.post(
        "/schedule",
        summary="Switch a model to another schedule for the same number of devices.",
        **described.administration(Accepted, ScheduleToFollow),
    )
    async def schedule(request: Request, model: str | None = None, replica: str = "0") -> Response:
        check_token(request, frontends.admin)  # before any parameter is judged: so the number is a text until here
        asked = _schedule(await read_json(request, MAX_BODY))
        if not (replica.isdecimal() and len(replica) <= _DIGITS):
            raise invalid(f"'replica' must be a number from 0 on (got {reprlib.repr(replica)}).", "replica")
        frontend = frontends.replica(model, int(replica))
        frontend.check_ready()
        _check_follows(asked, frontend)
        frontend.link.follow(asked)
        return JSONResponse({"accepted": True}, 202)

    if frontends.follow_plan is not None:
        _add_plan(api, described, frontends)

    @api.post(
        "/drain",
        summary="Shut the server down once all accepted requests are answered.",
        **described.administration(Draining),
    )
    async def drain(request: Request) -> Response:
        check_token(request, frontends.admin)
        frontends.drain()
        return JSONResponse({"draining": True}, 202)


def _add_plan(api: FastAPI, described: Description, frontends: Frontends) -> None:
    @api.post(
        "/plan",
        summary="Switch the models to another plan. Engines that differ are replaced.",
        **described.administration(Accepted, PlanToFollow),
    )
    async def plan(request: Request) -> Response:
        check_token(request, frontends.admin)
        data = await read_json(request, MAX_PLAN)
        frontends.check_ready()
        assert frontends.follow_plan, "a server of a plan"
        try:
            asked = document.from_dict(Plan, data, "The plan")
            if {model.name for model in asked.models} != set(frontends.names):
                raise InputError(f"The plan must have the models of this server: {', '.join(frontends.names)}.")
            frontends.follow_plan(asked)
        except InputError as error:
            raise invalid(str(error)[:500]) from None
        return JSONResponse({"accepted": True}, 202)


def check_token(request: Request, admin: bytes | None) -> None:
    """Raise ApiError without the administrator's token, whose hash is `admin`.

    The token has its own header, because it may come with an API key.
    """
    given = hashed(request.headers.get("x-admin-token", ""))
    if admin is None or not hmac.compare_digest(given, admin):
        raise ApiError(401, "The administrator's token is missing or wrong: send X-Admin-Token.", "invalid_api_key")


def _schedule(data: object) -> Schedule:
    """Read the schedule of a request's body."""
    try:
        schedule = checked(document.from_dict(Schedule, data, "The schedule"))
        schedule.check_stages()
    except InputError as error:
        raise invalid(str(error)[:500]) from None
    return schedule


def _check_follows(schedule: Schedule, frontend: Frontend) -> None:
    """Raise ApiError for a schedule that the model's engine can't follow."""
    if frontend.shares:
        raise invalid(
            f"The model shares its devices with {', '.join(frontend.shares)}: change its schedule with POST /plan."
        )
    assert frontend.link.opened, "an engine that has opened"
    held = frontend.link.opened.schedule
    try:
        schedule.check_model(held.model.spec)
    except InputError as error:
        raise invalid(str(error)[:500]) from None
    need, have = _devices(schedule), _devices(held)
    if need != have or (schedule.dtype, schedule.kv_dtype) != (held.dtype, held.kv_dtype):
        raise invalid(
            f"The schedule needs {need} devices, dtype {schedule.dtype} and kv_dtype {schedule.kv_dtype}. The engine "
            f"has {have} devices, dtype {held.dtype} and kv_dtype {held.kv_dtype}."
        )


def _devices(schedule: Schedule) -> int:
    return sum(stage.tp for stage in schedule.stages) * schedule.replicas
