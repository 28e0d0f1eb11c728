"""Unrouted: requests to a server of several models that reach none of them: unreadable ones, and those for others."""

import time

from prometheus_client import CollectorRegistry, Counter

from exegpt.server.answered import Answered, outcome_of
from exegpt.server.metrics import REQUESTS
from exegpt.server.monitor import Answering, Arrival
from exegpt.server.reports import Reports


class Unrouted:
    """Stands for a model's monitor."""

    def __init__(self, reports: Reports):
        self._reports = reports
        self.registry = CollectorRegistry()
        name, about, labels = REQUESTS
        self._requests = Counter(f"exegpt_{name}", about, labels, registry=self.registry)

    def answered(
        self,
        request_id: str,
        path: str,
        arrival: Arrival,
        status: int | None,
        code: str | None,
        answering: Answering | None,
    ) -> None:
        """A request has ended; `status` None: its client had gone before the last byte was sent."""
        now_s, outcome = time.monotonic(), outcome_of(status, ())
        answered = Answered(request_id, None, path, status or 499, outcome, "none", code, now_s, now_s - arrival.at_s)
        self._requests.labels(outcome, "none").inc()
        self._reports.answered(answered, arrival.parent)
