"""Unrouted: requests to a server of several models that reach none of them: unreadable ones, and those with an unknown
model.
"""

import time

from prometheus_client import CollectorRegistry, Counter

from xserver.http.answered import Answered, outcome_of
from xserver.telemetry.metrics import REQUESTS
from xserver.telemetry.monitor import Exchange
from xserver.telemetry.reporting import reporting
from xserver.telemetry.reports import Reports


class Unrouted:
    """Takes the place of a model's monitor."""

    def __init__(self, reports: Reports):
        self._reports = reports
        self.registry = CollectorRegistry()
        name, about, labels = REQUESTS
        self._requests = Counter(f"exegpt_{name}", about, labels, registry=self.registry)

    def ended(self, exchange: Exchange) -> None:
        """A request and its answer are over."""
        now_s, outcome = time.monotonic(), outcome_of(exchange.status, ())
        answered = Answered(
            exchange.request_id,
            None,
            exchange.path,
            exchange.status or 499,
            outcome,
            "none",
            exchange.code,
            now_s,
            now_s - exchange.arrival.at_s,
        )
        with reporting("metrics"):
            self._requests.labels(outcome, "none").inc()
        self._reports.answered(answered, exchange.arrival.parent)
