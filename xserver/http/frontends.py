"""Frontends: the models of one server and their replicas, and the routing of requests to them."""

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from xcore.batching.dispatch import fewest_requests
from xcore.console.output import note
from xcore.quantity import counted
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

    Frontends of one model's name are its replicas.
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
        self._by_name: dict[str, list[Frontend]] = {}
        for frontend in frontends:
            self._by_name.setdefault(frontend.model.name, []).append(frontend)
        self._sent: WeakKeyDictionary[Entry, Frontend] = WeakKeyDictionary()
        """The replica that has each journalled request."""
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
            labelled = [
                ({"model_name": name} | ({"replica": str(number)} if len(replicas) > 1 else {}), replica)
                for name, replicas in self._by_name.items()
                for number, replica in enumerate(replicas)
            ]
            registries = [(labels, replica.monitor.metrics.registry) for labels, replica in labelled]
            self.counted = ByModel([*registries, ({"model_name": ""}, self.registry)])
        for counter in (FAILURES, REFUSED_CONNECTIONS):
            self.registry.register(counter)

    @property
    def by_name(self) -> Mapping[str, Frontend]:
        """The frontend of each model, or of its first replica."""
        return {name: replicas[0] for name, replicas in self._by_name.items()}

    @property
    def names(self) -> list[str]:
        """The models' names."""
        return list(self._by_name)

    @property
    def only(self) -> Frontend | None:
        """The model of a server with a single model and no replicas; None if there are several."""
        return self.each[0] if len(self.each) == 1 else None

    def of(self, name: str | None, entry: Entry | None = None) -> Frontend:
        """Return the frontend for a request that arrives now, of the model that it names, or of the only one.

        Of the model's replicas that accept requests, it is the one whose engine has the fewest requests; of equal ones,
        the first. A journalled request, whose `entry` may be running, stays with its replica.

        Raises ApiError if there is no such model, or if there are several and the request names none.
        """
        replicas = self._replicas(name)
        ready = [frontend for frontend in replicas if frontend.ready] or replicas
        fewest = ready[fewest_requests([frontend.engine_requests for frontend in ready])]
        return self._sent.setdefault(entry, fewest) if entry else fewest

    def replica(self, name: str | None, number: int = 0) -> Frontend:
        """Return a replica of a model by its number. Raises ApiError if there is none."""
        replicas = self._replicas(name)
        if not 0 <= number < len(replicas):
            has = f"0 to {len(replicas) - 1}" if len(replicas) > 1 else "0 only"
            raise ApiError(404, f"There is no replica {number} of the model: it has {has}.", "not_found", "replica")
        return replicas[number]

    def replicas(self, frontend: Frontend) -> int:
        """Return the number of replicas of a frontend's model."""
        return len(self._by_name[frontend.model.name])

    def _replicas(self, name: str | None) -> list[Frontend]:
        """Return the replicas of a model; without a name, of the only one."""
        names = ", ".join(f"'{name}'" for name in self.names)
        has = f"this server has {names}."
        if name is None:
            if len(self._by_name) > 1:
                raise invalid(f"'model' is missing: {has}", "model")
            return next(iter(self._by_name.values()))
        if name not in self._by_name:
            raise ApiError(404, f"The model {reprlib.repr(name)} does not exist: {has}", "model_not_found", "model")
        return self._by_name[name]

    def take_over(self, frontend: Frontend) -> None:
        """Let replicas of a model continue the requests of a frontend whose node is lost, also while the server drains.

        Requests that need more KV blocks than a replica has wait for the node.
        """
        moved, others = 0, [other for other in self._by_name[frontend.model.name] if other is not frontend]
        for output in list(frontend.link.outputs.values()):
            room = [other for other in others if other.has_room_for(output.request)]
            if room:
                room[fewest_requests([other.engine_requests for other in room])].link.take_over(output)
                moved += 1
        if moved:
            text = f"{counted(moved, 'sequence')} of {frontend.model.name} continue on another replica"
            note(text, event="requests_moved", sequences=moved)

    def unfinished(self, frontend: Frontend) -> list[Entry]:
        """Return the journalled requests to this model that another process has left unanswered.

        A model's first replica has all of them.
        """
        if self._by_name[frontend.model.name][0] is not frontend:
            return []
        entries = frontend.journal.unfinished if frontend.journal else []
        ours = entries if self.only else [e for e in entries if e.body.get("model") == frontend.model.name]
        self._sent.update(dict.fromkeys(ours, frontend))
        return ours

    def unserved(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the journal entries for models that this server doesn't have."""
        return [] if self.only else [entry for entry in entries if entry.body.get("model") not in self._by_name]

    def check_ready(self) -> None:
        """Raise ApiError while no replica of a model accepts requests."""
        if self.residency and (loaded := [frontend for frontend in self.each if frontend.link.opened]):
            for frontend in loaded:
                frontend.check_ready()
            return
        for replicas in self._by_name.values():
            if not any(frontend.ready for frontend in replicas):
                replicas[0].check_ready()

    @property
    def active(self) -> int:
        """The number of requests that are being answered."""
        return sum(frontend.active for frontend in self.each)

    def refuse_more(self) -> None:
        """Stop accepting requests."""
        for frontend in self.each:
            frontend.draining = True
