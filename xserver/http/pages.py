"""Pages and documents about a running server, for people and for monitoring."""

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from xcore import __version__
from xcore.document import to_dict
from xcore.specs.timeline import Span
from xserver.admission.predicted import targets
from xserver.http.frontend import Frontend
from xserver.http.frontends import Frontends
from xserver.http.openapi import Description
from xserver.http.responses import EnforcedSchedule, FollowedPlan
from xserver.nodes.launch_protocol import address_text
from xserver.telemetry.metrics_page import render

_PAGE = Path(__file__).parent / "status.html"
_SHOWN = 120
"""Number of spans that the page draws for each device."""
_MOST_DEVICES = 8
"""Maximum number of devices that the page draws."""


def add_pages(api: FastAPI, described: Description, frontends: Frontends) -> None:
    """Add `/metrics`, `/schedule`, `/plan`, `/status` and the status page."""
    counted = frontends.counted

    @api.get("/metrics", include_in_schema=False, summary="Metrics for Prometheus.")
    async def metrics(request: Request) -> Response:
        text, kind = render(counted, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": kind})

    @api.get("/schedule", summary="The schedule that a model's engine follows.", **described.route(EnforcedSchedule))
    async def schedule(model: str | None = None, replica: int = 0) -> Response:
        frontend = frontends.replica(model, replica)
        return JSONResponse(schedule_document(frontend) | {"replicas": frontends.replicas(frontend)})

    if followed := frontends.followed:

        @api.get("/plan", summary="The plan that the models follow.", **described.route(FollowedPlan))
        async def plan() -> Response:
            return JSONResponse(followed())

    @api.get("/status", include_in_schema=False, summary="The data of the status page.")
    async def status(model: str | None = None, replica: int = 0) -> Response:
        shown = frontends.each[0] if model is None else frontends.replica(model, replica)
        return JSONResponse(status_document(shown, frontends), headers={"Cache-Control": "no-store"})

    @api.get("/", summary="The status page.", include_in_schema=False)
    async def page() -> Response:
        text, policy = status_page()
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(text, headers=headers | {"Referrer-Policy": "no-referrer"})


def schedule_document(frontend: Frontend) -> dict[str, object]:
    """Return the enforced, predicted and observed state; ApiError while there is no engine."""
    opened, monitor = frontend.link.opened, frontend.monitor
    if opened is None:
        raise frontend.starting
    estimate = monitor.predicted.estimate if monitor.predicted else None
    return {
        "schedule": to_dict(opened.schedule),
        "goodput_seq_s": opened.goodput_seq_s,
        "assumptions": list(opened.assumptions),
        "predicted": {
            "steady_state": to_dict(estimate) if estimate else None,
            "batch_size": dict(targets(opened.schedule)),
        },
        "observed": _observed(frontend),
    }


def _observed(frontend: Frontend) -> dict[str, object]:
    scale = frontend.admission.scale if frontend.admission else None
    return {**frontend.monitor.observed.minute(time.monotonic()), "scale_of_predictions": scale}


def status_document(frontend: Frontend, frontends: Frontends) -> dict[str, object]:
    """Return the status page's data for one of the server's models."""
    monitor, opened, now_s = frontend.monitor, frontend.link.opened, time.monotonic()
    predicted = monitor.predicted
    waiting, running = monitor.queued()
    enforced = opened.schedule if opened else None
    return {
        "version": __version__,
        "model": frontend.model.name,
        "models": frontends.names,
        "state": _state(frontend),
        "node": _node(frontend),
        "up_s": round(now_s - monitor.observed.since_s, 1),
        "active_requests": frontend.active,
        "waiting": waiting,
        "running": running,
        "kv_usage": monitor.kv_usage(),
        "restarts": monitor.restarts,
        "preemptions": monitor.preemptions,
        "preemptions_minute": monitor.observed.preempted(now_s),
        "policy": enforced.policy if enforced else None,
        "latency_bound_s": enforced.latency_bound_s if enforced else None,
        "goodput_seq_s": opened.goodput_seq_s if opened else None,
        "predicted_tok_s": predicted.estimate.throughput_tok_s if predicted and predicted.estimate else None,
        "batch_size": {"target": targets(enforced) if enforced else {}, "actual": monitor.batch_sizes()},
        "minute": _observed(frontend),
        "series": monitor.observed.series(now_s),
        "timeline": {
            "measured": _rows(monitor.observed.latest_spans(_SHOWN)),
            "predicted": _rows(predicted.spans) if predicted else [],
        },
    }


def _state(frontend: Frontend) -> str:
    if frontend.draining:
        return "draining"
    if frontend.admission is None:
        return "restarting" if frontend.restarting else "loading"
    return "ready"


def _node(frontend: Frontend) -> dict[str, object] | None:
    """Return the node that runs a model's engine; None for the server's own machine."""
    node = frontend.node
    if node is None:
        return None
    address = node.address
    return {"number": address.node, "address": address_text(address.host, address.port), "reachable": node.up}


def _rows(spans: "Sequence[Span]") -> list[dict[str, object]]:
    """Return the first devices, each with its spans.

    A span is (phase, start, duration, sequences), in seconds from the first start of all.
    """
    zero_s = min((span.start_s for span in spans), default=0.0)
    rows: dict[int, list[list[object]]] = {}
    for s in spans:
        row: list[object] = [s.phase, round(s.start_s - zero_s, 5), round(s.end_s - s.start_s, 5), s.sequences]
        rows.setdefault(s.device, []).append(row)
    return [{"device": device, "spans": rows[device]} for device in sorted(rows)[:_MOST_DEVICES]]


@cache
def status_page() -> tuple[str, str]:
    """Return the page, and a content security policy that allows only its own script and style."""
    text = _PAGE.read_text(encoding="utf-8")
    allowed = {kind: _hash(re.search(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)) for kind in ("script", "style")}
    policy = [f"{kind}-src {hashed}" for kind, hashed in allowed.items()]
    closed = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    return text, "; ".join([*closed, *policy, "connect-src 'self'", "img-src data:"])


def _hash(inline: "re.Match[str] | None") -> str:
    assert inline, "an inline element"
    digest = hashlib.sha256(inline[1].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
