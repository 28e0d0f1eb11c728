"""Metrics: a model's Prometheus metrics for `/metrics`, in the model's own registry."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from xcore import __version__
from xcore.requests.engine_protocol import Stepped
from xcore.specs.schedule import Schedule
from xserver.http.answered import Answered, Kind, MissReason, Outcome
from xserver.telemetry.metrics_page import render

REQUESTS = "requests", "Ended requests.", ("outcome", "class")
"""Name of the counter, help text, labels."""
REFUSED_CONNECTIONS = Counter(
    "exegpt_refused_connections", "Connections ended before a request was read.", ["code"], registry=None
)
"""The counter of this process, by the error's code; a server registers it with its other metrics."""
for _code in ("concurrency_limit", "headers_too_large", "invalid_value"):
    REFUSED_CONNECTIONS.labels(_code)
PREFIX_CACHE = {
    "queries": "Prompt tokens of begun sequences, if prefixes are cached.",
    "hits": "Prompt tokens that were in the cache.",
}
PHASES = "encode", "decode", "mixed"
REJECTIONS = (
    "latency_bound",
    "concurrency_limit",
    "loading",
    "draining",
    "engine_restarting",
    "node_lost",
    "journal_unavailable",
    "other",
)
_SECONDS = 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0
_PER_TOKEN = 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5
_PHASE = 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0
_ERRORS = -10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0
_OF_BOUND = 0.5, 0.75, 0.9, 1.0, 1.1, 1.5, 2.0
"""Edges of the latency's buckets, as shares of the bound."""


def edges(bound_s: float | None) -> list[float]:
    """Return the bucket edges of latencies; the bound is an edge, so the share within it is exact."""
    return sorted({*_SECONDS, *(share * bound_s for share in _OF_BOUND if bound_s is not None)})


class Metrics:
    """The metrics of the model with the name `model`.

    `sizes` returns the recent mean number of sequences per micro-batch, by phase. `queued` returns the numbers of
    waiting and running sequences, and `kv_usage` the share of KV blocks in use.
    """

    def __init__(
        self,
        model: str,
        sizes: Callable[[], Mapping[str, float]],
        queued: Callable[[], tuple[int, int]],
        kv_usage: Callable[[], float],
    ):
        self.registry, self._model = CollectorRegistry(), model
        self._sizes = sizes
        name, about, labels = REQUESTS
        self._requests = self._counter(name, about, *labels)
        self._rejections = self._counter("rejections", "Rejected requests.", "reason")
        self._misses = self._counter("bound_misses", "Accepted requests answered after the bound.", "reason")
        self._tokens = self._counter("tokens", "Prompt tokens of ended requests, and generated tokens.", "kind")
        self._prefixes = {
            name: (
                self._counter(f"prefix_cache_{name}", about),
                Counter(f"vllm:prefix_cache_{name}", about, ["model_name"], registry=self.registry).labels(model),
            )
            for name, about in PREFIX_CACHE.items()
        }
        """Each counter, and vLLM's of the same name."""
        self.restarts = self._counter("engine_restarts", "Restarts of lost engines.")
        self.reschedules = self._counter("reschedules", "Changes of the schedule while serving.")
        self._preemptions = self._counter("preemptions", "Sequences preempted for lack of KV blocks.")
        self._drift = self._gauge("drift_statistic", "Distance of the observed lengths from the schedule's workload.")
        self._batch = self._gauge("batch_size", "Sequences per micro-batch.", "phase", "kind")
        self._phase = self._histogram("phase_seconds", "Time that a micro-batch takes on one stage.", _PHASE, "phase")
        self._per_token = self._histogram("time_per_output_token_seconds", "Time per later token.", _PER_TOKEN)
        self._wait = self._histogram("queue_wait_seconds", "Time from arrival to the start of the prefill.", _SECONDS)
        self._wait_error = self._histogram("wait_prediction_error_seconds", "Measured minus predicted start.", _ERRORS)
        self._end_error = self._histogram("end_prediction_error_seconds", "Measured minus predicted end.", _ERRORS)
        build = self._gauge("build_info", "Always 1; the labels are the version and the model.", "version", "model")
        build.labels(__version__, model).set(1)
        self._add_queue(queued, kv_usage)
        self._start_labels()
        self._latency: Histogram | None = None
        """None until the bound is known."""

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the text of all metrics, and its media type."""
        return render(self.registry, accept)

    # ---- events ----

    def opened(self, schedule: Schedule, targets: Mapping[str, float]) -> None:
        """Set the metrics of a new engine; `targets` are the schedule's batch sizes by phase."""
        for phase in PHASES:
            self._batch.labels(phase, "target").set(targets.get(phase, 0))
        if self._latency is None:
            buckets = edges(schedule.latency_bound_s)
            about = "Time from the last byte of the body to the last byte of the answer."
            self._latency = self._histogram("request_latency_seconds", about, buckets, "class")
            self._ttft = self._histogram("time_to_first_token_seconds", "Time to the first token.", _SECONDS)
            self._vllm_latency, self._vllm_ttft = (
                Histogram(f"vllm:{name}_seconds", "As exegpt's.", ["model_name"], buckets=at, registry=self.registry)
                for name, at in (("e2e_request_latency", buckets), ("time_to_first_token", _SECONDS))
            )
            for kind in ("usual", "long"):
                self._latency.labels(kind)

    def stepped(self, stepped: Stepped, preempted: int) -> None:
        """Count a step of the engine, in which `preempted` sequences were preempted."""
        self._tokens.labels("output").inc(len(stepped.tokens))
        for span in stepped.spans:
            if span.phase in PHASES:
                self._phase.labels(span.phase).observe(span.end_s - span.start_s)
        self._preemptions.inc(preempted)
        self._drift.set(stepped.occupancy.drift)

    def answered(self, answered: Answered) -> None:
        """Count a request that has ended."""
        self._requests.labels(answered.outcome, answered.kind).inc()
        if answered.outcome == "rejected":
            self._rejections.labels(answered.code if answered.code in REJECTIONS else "other").inc()
        if not answered.prompt_tokens:  # never admitted: an overload has thousands of these per second
            return
        self._tokens.labels("prompt").inc(answered.prompt_tokens)
        for name, count in (("queries", answered.looked_up_tokens), ("hits", answered.cached_tokens)):
            for counter in self._prefixes[name]:
                counter.inc(count)
        if answered.miss:
            self._misses.labels(answered.miss).inc()
        if answered.queue_wait_s is not None:
            self._wait.observe(answered.queue_wait_s)
        if answered.wait_error_s is not None:
            self._wait_error.observe(answered.wait_error_s)
        if answered.end_error_s is not None:
            self._end_error.observe(answered.end_error_s)
        for seconds in answered.tpot_s:
            self._per_token.observe(seconds)
        if self._latency is None or answered.kind not in ("usual", "long"):
            return
        if answered.outcome == "answered":
            self._latency.labels(answered.kind).observe(answered.latency_s)
            self._vllm_latency.labels(self._model).observe(answered.latency_s)
        if answered.ttft_s is not None:
            self._ttft.observe(answered.ttft_s)
            self._vllm_ttft.labels(self._model).observe(answered.ttft_s)

    # ---- construction ----

    def _add_queue(self, queued: Callable[[], tuple[int, int]], kv_usage: Callable[[], float]) -> None:
        gauges: dict[str, tuple[str, str, Callable[[], float]]] = {
            "queue_requests": ("vllm:num_requests_waiting", "Waiting sequences.", lambda: queued()[0]),
            "running_requests": ("vllm:num_requests_running", "Running sequences.", lambda: queued()[1]),
            "kv_usage_ratio": ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", kv_usage),
        }
        for name, (theirs, about, value) in gauges.items():
            self._gauge(name, about).set_function(value)
            Gauge(theirs, about, ["model_name"], registry=self.registry).labels(self._model).set_function(value)

    def _start_labels(self) -> None:
        """Create every series with the value 0: a rate needs the value before the first event."""
        for outcome in get_args(Outcome):
            for kind in get_args(Kind):
                self._requests.labels(outcome, kind)
        for reason in REJECTIONS:
            self._rejections.labels(reason)
        for miss in get_args(MissReason):
            self._misses.labels(miss)
        for kind in ("prompt", "output"):
            self._tokens.labels(kind)
        for phase in PHASES:
            self._phase.labels(phase)
            self._batch.labels(phase, "target").set(0)
            self._batch.labels(phase, "actual").set_function(partial(self._size, phase))

    def _size(self, phase: str) -> float:
        return self._sizes().get(phase, 0.0)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"exegpt_{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"exegpt_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: "list[float] | tuple[float, ...]", *labels: str) -> Histogram:
        return Histogram(f"exegpt_{name}", about, labels, buckets=buckets, registry=self.registry)
