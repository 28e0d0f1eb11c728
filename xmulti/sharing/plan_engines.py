"""The engines of a plan in simulated time, and the dispatcher that gives them requests, in one event queue.

Each request goes to the replica of its model whose engine has the fewest requests when it arrives: requests to any of
the engine's models that aren't answered. In one queue, the end of a request on one engine can be an arrival on another.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import cycle
from math import inf

from xcore.batching import Ledger, Sequence
from xcore.batching.dispatch import fewest_requests
from xcore.orders import fcfs
from xcore.specs.cluster_plan import PlannedModel, Share, Unit
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimes
from xcore.specs.timeline import Span
from xmulti.sharing.plan_order import PlanOrder
from xmulti.sharing.replay import empty_tenant
from xmulti.sharing.simulated_unit import SimulatedUnit
from xmulti.sharing.unit_loads import CONTENTION, AnyProfile, loads_of, order_of, overhead_of, rule_of
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.event_queue import Actor, events
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica, micro_batching_of

ProfileOf = Callable[[PlannedModel], AnyProfile]
"""The profile of a plan's model, or of one of its replicas."""
Answer = tuple[str, RequestTimes]
"""The model of an answered request, and its times."""


class PlanEngine:
    """The engine of a unit's models in simulated time. Its `actors` run in an event queue."""

    def __init__(self, unit: Unit, profile_of: ProfileOf, most: int, keep_spans: bool, order: PlanOrder | None = None):
        """Create an engine without requests; their indices are below `most`.

        `order` None: that of the plan's method; else sequences come with its hints.
        """
        profiles = {model.name: profile_of(model) for model in unit}
        self.unit = unit
        self.actors: list[Actor] = []
        self._order = order
        known = {} if order else {model.name: order_of(model, profiles[model.name])[1] for model in unit}
        self._hints = {name: hints for name, hints in known.items() if hints}
        self._records: dict[str, Record] = {}
        self._ledgers: dict[str, list[Ledger]] = {}
        self._submit: dict[str, Callable[[Sequence], None]] = {}
        self._spans: Callable[[int], Iterator[Span]]
        profile = profiles[unit[0].name]
        if unit[0].share is None and isinstance(profile, Profile):
            self._alone(unit[0], profile, most, keep_spans)
        else:
            self._shared(unit, profiles, most, keep_spans)
        self._seen = dict.fromkeys(self._records, 0)
        self._unanswered = 0
        self._ends: list[float] = []
        """A heap of the ends of answered requests that still count as unanswered."""

    def _alone(self, model: PlannedModel, profile: Profile, most: int, keep_spans: bool) -> None:
        """Create the engine of a model with separate devices.

        It runs one iteration at a time: a request may arrive during a row of iterations.
        """
        schedule, order = model.schedule, self._order.of(model) if self._order else fcfs
        cost, micro_batching = ReplicaCost.of(schedule, profile), micro_batching_of(schedule)
        record = Record(most, micro_batching.index, schedule.model.spec.encoder_layers > 0, profile.front_end_s)
        replicas = [
            Replica(schedule, cost, record, micro_batching, number, order, keep_spans=keep_spans, step_by_step=True)
            for number in range(schedule.replicas)
        ]
        turns = cycle(replicas)  # as an open engine does
        self.actors += replicas
        self._records[model.name], self._ledgers[model.name] = record, [replica.ledger for replica in replicas]
        self._submit[model.name] = lambda sequence: next(turns).submit(sequence)
        sides = [side for replica in replicas for side in replica.sides.values()]
        self._spans = lambda place: (span for side in sides for span in side.spans or ())

    def _shared(self, unit: Unit, profiles: Mapping[str, AnyProfile], most: int, keep_spans: bool) -> None:
        """Create the engine of models that share devices."""
        loads = loads_of(unit, profiles, {}, self._order)
        self._records |= {load.name: Record(most, lambda _: 0, False, load.front_end_s) for load in loads}
        tenants = [empty_tenant(load, self._records[load.name]) for load in loads]
        rule = rule_of(unit[0].share or Share("time"))
        spans: list[Span] | None = [] if keep_spans else None
        shared = SimulatedUnit(tenants, rule, CONTENTION, overhead_of(unit, profiles), spans=spans)
        self.actors.append(shared)
        for tenant in tenants:
            self._ledgers[tenant.name] = [tenant.ledger]
            self._submit[tenant.name] = partial(shared.submit, tenant)
        self._spans = lambda place: (span for span in spans or () if span.stage == place)

    def submit(self, name: str, sequence: Sequence) -> None:
        """Submit a request that has arrived to one of the models."""
        sequence.hints = self._hints.get(name, sequence.hints)
        self._unanswered += 1
        self._submit[name](sequence)

    def answers(self) -> Iterator[Answer]:
        """Yield the answers since the last call."""
        for name, record in self._records.items():
            new = record.served[self._seen[name] :]
            self._seen[name] += len(new)
            for served in new:
                heapq.heappush(self._ends, served.finish_s)
                yield name, served

    def requests(self, now: float) -> int:
        """Return the number of requests that aren't answered before `now`, which never decreases."""
        while self._ends and self._ends[0] < now:
            heapq.heappop(self._ends)
            self._unanswered -= 1
        return self._unanswered

    def preemptions(self, name: str) -> int:
        """Return how many sequences of a model were preempted."""
        return sum(ledger.preemptions for ledger in self._ledgers[name])

    def spans(self, model: PlannedModel) -> list[Span]:
        """Return a model's spans, by the number of the device in its unit; empty unless they are kept."""
        return sorted(self._spans(self.unit.index(model)), key=lambda span: span.start_s)

    def check(self) -> None:
        """Check that all blocks are free again."""
        for ledger in (ledger for ledgers in self._ledgers.values() for ledger in ledgers):
            ledger.check()


class Dispatcher:
    """Requests that have not arrived. An `Actor`: its events are arrivals at the engines with the fewest requests."""

    def __init__(self, engines: Items[PlanEngine]):
        self._hosts: dict[str, list[PlanEngine]] = {}
        for engine in engines:
            for model in engine.unit:
                self._hosts.setdefault(model.name, []).append(engine)
        self._ahead: list[tuple[float, int, str, Sequence]] = []
        self._number = 0
        self.sent: dict[tuple[str, int], PlanEngine] = {}
        """The engine of each request that has arrived, by model and index."""

    @property
    def idle(self) -> bool:
        """Whether all requests have arrived."""
        return not self._ahead

    def next_event(self) -> float:
        """Return when the next request arrives."""
        return self._ahead[0][0] if self._ahead else inf

    def submit(self, name: str, sequence: Sequence) -> None:
        """Let a request arrive at its time; of equal times, in the order of submission."""
        heapq.heappush(self._ahead, (sequence.arrival_s, self._number, name, sequence))
        self._number += 1

    def act(self, now: float) -> None:
        """Send the requests that arrive now to engines."""
        while self._ahead and self._ahead[0][0] <= now:
            _, _, name, sequence = heapq.heappop(self._ahead)
            hosts = self._hosts[name]
            host = hosts[fewest_requests([each.requests(now) for each in hosts])]
            self.sent[name, sequence.index] = host
            host.submit(name, sequence)


class PlanEngines:
    """The engines of a plan's units, with their dispatcher."""

    def __init__(
        self,
        units: Items[Unit],
        profile_of: ProfileOf,
        most: int,
        keep_spans: bool = False,
        order: PlanOrder | None = None,
    ):
        """Create engines without requests; the indices of each model's requests are below `most`.

        `order` None: that of the plan's method; else sequences come with its hints.
        """
        self.each = [PlanEngine(unit, profile_of, most, keep_spans, order) for unit in units]
        self.dispatcher = Dispatcher(self.each)
        names = {model.name: None for unit in units for model in unit}
        self.served: dict[str, list[RequestTimes]] = {name: [] for name in names}
        """Answered requests by model, in the order in which their ends became known."""

    def run(self) -> Iterator[tuple[float, list[Answer]]]:
        """Run all submitted requests; yield the time of each event, and the requests whose ends became known by it."""
        for now in events([self.dispatcher, *(actor for engine in self.each for actor in engine.actors)]):
            answers = [answer for engine in self.each for answer in engine.answers()]
            for name, served in answers:
                self.served[name].append(served)
            yield now, answers

    def in_order(self, name: str) -> tuple[RequestTimes, ...]:
        """Return a model's answered requests in order of completion."""
        return tuple(sorted(self.served[name], key=lambda served: (served.finish_s, served.index)))
