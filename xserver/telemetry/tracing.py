"""Tracing: an OpenTelemetry span for every API request, if an endpoint is configured, without text and token ids.

A request's span is created when the request has ended, with the times of its events, and put in a bounded queue. A
thread of OpenTelemetry exports batches from the queue over HTTP, so no answer and no event loop waits for a collector.
Attributes are named by OpenTelemetry's conventions (gen_ai, http), latencies by vLLM's; others begin with `exegpt.`.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from xcore import __version__
from xcore.errors import InputError
from xserver.http.answered import Answered
from xserver.http.generation import Choice

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

Value = str | int | float | list[str]

PARENT = "traceparent", "tracestate"
"""Headers of W3C Trace Context, which link a request to its caller's trace."""
_ENDPOINTS = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOLS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
"""In each pair, the first variable is for traces only and takes precedence over the second."""
_PROTOCOL = "http/protobuf"
_OPERATIONS = {"/v1/chat/completions": "chat"}
"""The operation by path; other paths are `text_completion`."""
_CLOSE_S = 3.0
"""Time limit for exporting the last spans when the server ends."""


class Tracing:
    """Exports the spans of one server's requests to `endpoint`, a collector's URL for traces.

    None: to the endpoint in OpenTelemetry's environment variables.
    """

    def __init__(self, endpoint: str | None = None):
        self._provider = _provider(endpoint)
        self._tracer = self._provider.get_tracer("exegpt", __version__)

    def answered(self, answered: Answered, parent: Mapping[str, str], choices: Sequence[Choice]) -> None:
        """Export the span of an ended request.

        `parent` has the headers of its caller's trace; `choices` are its sequences, if it ran any.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        begin_s, ahead_ns = answered.ended_s - answered.latency_s, time.time_ns() - time.monotonic_ns()

        def add(name: str, start_s: float, end_s: float, kind: SpanKind, within: "Span | None" = None) -> "Span":
            context = set_span_in_context(within) if within else TraceContextTextMapPropagator().extract(parent)
            span = self._tracer.start_span(name, context, kind, start_time=int(start_s * 1e9) + ahead_ns)
            if within:
                span.end(int(end_s * 1e9) + ahead_ns)
            return span

        operation = _OPERATIONS.get(answered.path, "text_completion")
        named = f"{operation} {answered.model}" if answered.model else operation
        whole = add(named, begin_s, answered.ended_s, SpanKind.SERVER)
        whole.set_attribute("gen_ai.operation.name", operation)
        whole.set_attributes(_facts(answered) | _asked(choices))
        for name, start_s, end_s in _phases(choices, begin_s):
            add(name, start_s, end_s, SpanKind.INTERNAL, whole)
        if answered.outcome == "failed":
            from opentelemetry.trace import StatusCode

            whole.set_status(StatusCode.ERROR)
        whole.end(int(answered.ended_s * 1e9) + ahead_ns)

    def close(self) -> None:
        """Export the remaining spans, if a collector accepts them in time."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)  # shutdown may wait for half a minute
        closing.start()
        closing.join(_CLOSE_S)


def tracing(endpoint: str | None) -> Tracing | None:
    """Return the tracing of a server; None if neither `endpoint` nor the environment names an endpoint.

    Raises InputError if spans can't be exported at all.
    """
    given = endpoint or next(filter(None, map(os.environ.get, _ENDPOINTS)), None)
    if given is None:
        return None
    if not _is_url(given):
        raise InputError(
            f"Traces can't be sent to '{given}': give the URL of an OTLP collector, http://HOST:4318/v1/traces."
        )
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), _PROTOCOL)
    if protocol != _PROTOCOL:
        raise InputError(f"Traces can only be sent as {_PROTOCOL}, but {_PROTOCOLS[1]} is '{protocol}': unset it.")
    return Tracing(endpoint)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _provider(endpoint: str | None) -> "TracerProvider":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InputError(
            f"An endpoint for traces is set, but the package {error.name} is not installed: pip install 'exegpt[otel]'."
        ) from None
    own = Resource.create({"service.name": "exegpt", "service.version": __version__})
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


def _facts(answered: Answered) -> dict[str, Value]:
    """Return the attributes for the result of a request."""
    facts: dict[str, Value | None] = {
        "http.request.method": "POST",
        "http.route": answered.path,
        "http.response.status_code": answered.status,
        "error.type": answered.code or (answered.outcome if answered.outcome in ("failed", "cancelled") else None),
        "gen_ai.request.model": answered.model,
        "gen_ai.request.id": answered.request_id,
        "exegpt.client_request_id": answered.client_id,
        "gen_ai.usage.input_tokens": answered.prompt_tokens or None,
        "gen_ai.usage.output_tokens": answered.output_tokens or None,
        "gen_ai.latency.e2e": answered.latency_s,
        "gen_ai.latency.time_to_first_token": answered.ttft_s,
        "gen_ai.latency.time_in_queue": answered.queue_wait_s,
        "exegpt.outcome": answered.outcome,
        "exegpt.class": answered.kind,
        "exegpt.bound_miss": answered.miss,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _asked(choices: Sequence[Choice]) -> dict[str, Value]:
    """Return the attributes for a request's parameters and the finish reasons of its sequences.

    Empty without sequences.
    """
    if not choices:
        return {}
    request = choices[0].request
    return {
        "gen_ai.request.choice.count": len(choices),
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.response.finish_reasons": [choice.finish_reason or "error" for choice in choices],
    }


def _phases(choices: Sequence[Choice], begin_s: float) -> list[tuple[str, float, float]]:
    """Return the known phases of a request, by the monotonic clock.

    The queue lasts until any of its sequences starts, prefill until any has its first token, and decode until all have
    their last tokens.
    """
    outputs = [choice.output for choice in choices]
    firsts = [output.first_s for output in outputs if output.first_s is not None]
    starts = [output.start_s for output in outputs if output.start_s is not None]
    if not firsts:
        return []
    first_s, phases = min(firsts), []
    if starts:
        start_s = min(max(begin_s, min(starts)), first_s)
        phases = [("queue", begin_s, start_s), ("prefill", start_s, first_s)]
    return [*phases, ("decode", first_s, max(output.last_s for output in outputs))]
