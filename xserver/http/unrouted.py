"""Unrouted: requests to a server of several models that reach none of them.

They are unreadable or name an unknown model.
"""

import time

from prometheus_client import CollectorRegistry, Counter

from xserver.http.answered import Answered, outcome_of
from xserver.telemetry.metrics import REQUESTS
from xserver.telemetry.monitor import Exchange
from xserver.telemetry.reporting import reporting
from xserver.telemetry.request_reports import Reports


class Unrouted:
    """Replaces a model's monitor for these requests."""

    def __init__(self, reports: Reports):
        self._reports = reports
        self.registry = CollectorRegistry()
        name, about, labels = REQUESTS
        self._requests = Counter(f"exegpt_{name}", about, labels, registry=self.registry)

    def ended(self, exchange: Exchange) -> None:
        """Count and log a request that has ended with its answer."""
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
            client_id=exchange.client_id,
        )
        with reporting("metrics"):
            self._requests.labels(outcome, "none").inc()
        self._reports.answered(answered, exchange.arrival.parent)
