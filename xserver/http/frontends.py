"""Frontends: the models of one server, and the routing of requests to them."""

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from xcore.specs.cluster_plan import Plan
from xserver.admission.measured import Counts
from xserver.http.api_error import ApiError, invalid
from xserver.http.frontend import Frontend
from xserver.http.journal import Entry
from xserver.http.unrouted import Unrouted
from xserver.telemetry.metrics import REFUSED_CONNECTIONS
from xserver.telemetry.metrics_page import ByModel
from xserver.telemetry.reporting import FAILURES
from xserver.telemetry.request_reports import Reports

if TYPE_CHECKING:
    from xserver.engines.residency import Residency


class Frontends:
    """The frontends of all models, in order; `admin` is the hash of the administrator's token (None: no token).

    With `separate_keys`, each API key's requests share cached prefixes only among themselves.
    """

    def __init__(
        self,
        frontends: Sequence[Frontend],
        admin: bytes | None = None,
        reports: Reports | None = None,
        separate_keys: bool = False,
    ):
        self.each = tuple(frontends)
        self.separate_keys = separate_keys
        self.admin = admin
        self.drain: Callable[[], object] = lambda: None
        """Drains the server: it ends when everything is answered."""
        self.follow_plan: Callable[[Plan], None] | None = None
        """Switches the models to another plan; None if there is no plan."""
        self.residency: Residency | None = None
        """Loads the models that requests need; None: all are loaded."""
        self.followed: Callable[[], dict[str, object]] | None = None
        """The answer of `GET /plan`; None if there is no plan."""
        self._by_name = {frontend.model.name: frontend for frontend in frontends}
        self.unrouted: Counts
        """Counts requests that reach no model."""
        self.counted: Collector
        """All metrics."""
        self.registry: CollectorRegistry
        """Metrics that belong to no single model."""
        if self.only:
            self.unrouted, self.registry = self.only.monitor, self.only.monitor.metrics.registry
            self.counted = self.registry
        else:
            self.unrouted = unrouted = Unrouted(reports or Reports())
            self.registry = unrouted.registry
            registries = {name: frontend.monitor.metrics.registry for name, frontend in self._by_name.items()}
            self.counted = ByModel(registries | {"": self.registry})
        for counter in (FAILURES, REFUSED_CONNECTIONS):
            self.registry.register(counter)

    @property
    def by_name(self) -> Mapping[str, Frontend]:
        """Each model's frontend."""
        return self._by_name

    @property
    def names(self) -> list[str]:
        """The models' names."""
        return list(self._by_name)

    @property
    def only(self) -> Frontend | None:
        """The model of a server with a single model; None if there are several."""
        return self.each[0] if len(self.each) == 1 else None

    def of(self, name: str | None) -> Frontend:
        """Return the model that a request names; without a name, the only one.

        Raises ApiError if there is no such model, or if there are several and the request names none.
        """
        names = ", ".join(f"'{name}'" for name in self.names)
        has = f"this server has {names}."
        if name is None:
            if self.only is None:
                raise invalid(f"'model' is missing: {has}", "model")
            return self.only
        if name not in self._by_name:
            raise ApiError(404, f"The model {reprlib.repr(name)} does not exist: {has}", "model_not_found", "model")
        return self._by_name[name]

    def unfinished(self, frontend: Frontend) -> list[Entry]:
        """Return the journalled requests to this model that another process has left unanswered."""
        entries = frontend.journal.unfinished if frontend.journal else []
        return entries if self.only else [e for e in entries if e.body.get("model") == frontend.model.name]

    def unserved(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the journal entries for models that this server doesn't have."""
        return [] if self.only else [entry for entry in entries if entry.body.get("model") not in self._by_name]

    def check_ready(self) -> None:
        """Raise ApiError while a model accepts no requests."""
        loaded = [frontend for frontend in self.each if frontend.link.opened] if self.residency else self.each
        for frontend in loaded or self.each:
            frontend.check_ready()

    @property
    def active(self) -> int:
        """The number of requests that are being answered."""
        return sum(frontend.active for frontend in self.each)

    def refuse_more(self) -> None:
        """Stop accepting requests."""
        for frontend in self.each:
            frontend.draining = True
