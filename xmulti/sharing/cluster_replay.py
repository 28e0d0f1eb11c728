"""Requests of several services through a cluster: engines that services share, replicas, and the dispatch of requests.

If a service has several replicas, each request goes to the engine with the fewest requests at its arrival (SeaLLM).
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf

from xcore.batching import Hints, Sequence
from xcore.batching.dispatch import fewest_requests
from xcore.policies.sharing import Sharing
from xcore.specs.request_times import RequestTimes
from xcore.specs.workload import RequestLengths
from xmulti.sharing.replay import ModelLoad, empty_tenant, sequences_of
from xmulti.sharing.simulated_unit import SimulatedUnit
from xmulti.sharing.tenant import SimulatedTenant
from xsimulator.replay.event_queue import run
from xsimulator.replay.record import Record


@dataclass(frozen=True, eq=False)
class SharedEngine:
    """Services on one group of devices. Their loads have no requests: requests are dispatched."""

    devices: tuple[int, ...]
    loads: tuple[ModelLoad, ...]
    sharing: Sharing
    """A separate rule for each engine: rules may remember whose turn it is."""
    overhead: float = 1.0
    """Factor by which iterations take longer because services share."""

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """A key that is equal for engines that behave the same."""
        return self.devices, tuple(sorted(load.name for load in self.loads))


@dataclass(frozen=True)
class ServiceRequests:
    """The requests for one service."""

    lengths: tuple[RequestLengths, ...]
    hints: tuple[Hints, ...] = ()
    """The hints of each request for orders; empty: no hints."""


@dataclass(frozen=True)
class ClusterReplay:
    """The results of the services' requests."""

    served: dict[str, tuple[RequestTimes, ...]]
    """By service, in order of their indices."""
    busy_s: dict[str, float]
    """Seconds of all engines' jobs, by phase."""
    preemptions: int
    engines: int


@dataclass(eq=False)
class RunningEngine:
    """An engine in simulated time."""

    engine: SharedEngine
    unit: SimulatedUnit
    tenants: dict[str, SimulatedTenant] = field(init=False)

    def __post_init__(self) -> None:
        self.tenants = {tenant.name: tenant for tenant in self.unit.tenants}

    def requests(self, now: float) -> int:
        """Return the number of requests that have arrived and aren't done."""
        return sum([t.ledger.residents + t.ledger.waiting.arrived(now) for t in self.unit.tenants])


class SimulatedCluster:
    """Engines that run at the same time; only the dispatcher looks at several of them."""

    def __init__(self, engines: Items[SharedEngine], requests: Mapping[str, ServiceRequests]):
        """Start the engines; requests of services that no engine has are left out."""
        self._records = {name: Record(len(r.lengths), lambda _: 0, False) for name, r in requests.items()}
        self.running = [self._start(engine, 0.0, 0.0) for engine in engines]
        self._retired: list[RunningEngine] = []
        sequences = [
            (sequence.arrival_s, name, sequence.index, sequence)
            for name, asked in requests.items()
            for sequence in sequences_of(asked.lengths, asked.hints)
        ]
        self._ahead = self._dispatch_single(sorted(sequences, key=lambda entry: entry[:3]))

    def _start(self, engine: SharedEngine, now: float, resumes_s: float) -> RunningEngine:
        tenants = [empty_tenant(load, self._records[load.name]) for load in engine.loads]
        for tenant in tenants:
            tenant.resumes_s = resumes_s
        return RunningEngine(engine, SimulatedUnit(tenants, engine.sharing, overhead=engine.overhead, now=now))

    def _hosts(self, name: str) -> list[RunningEngine]:
        return [running for running in self.running if name in running.tenants]

    def _dispatch_single(
        self, ahead: list[tuple[float, str, int, Sequence]]
    ) -> Iterator[tuple[float, str, int, Sequence]]:
        """Submit requests of services that only one engine has; return the other requests, by arrival."""
        hosts = {name: self._hosts(name) for name in self._records}
        for _, name, _, sequence in ahead:
            if len(hosts[name]) == 1:
                hosts[name][0].tenants[name].ledger.submit([sequence])
        return iter([entry for entry in ahead if len(hosts[entry[1]]) > 1])

    def run(self, until: float = inf) -> None:
        """Run all requests to completion, or until a time in seconds."""
        self._dispatch(until)
        for running in self.running:
            run([running.unit], until)

    def _dispatch(self, until: float) -> None:
        """Give the requests that arrive until a time to replicas."""
        left = []
        for arrival_s, name, index, sequence in self._ahead:
            if arrival_s > until:
                left.append((arrival_s, name, index, sequence))
                break
            self._give(name, sequence, arrival_s)
        self._ahead = iter([*left, *self._ahead])

    def _give(self, name: str, sequence: Sequence, now: float) -> None:
        hosts = self._hosts(name)
        for running in hosts:
            run([running.unit], now)
        fewest = hosts[fewest_requests([running.requests(now) for running in hosts])]
        fewest.unit.submit(fewest.tenants[name], sequence)

    def replace(self, engines: Items[SharedEngine], now: float, stopped_s: float = 0.0) -> float:
        """Continue with other engines, after the running iterations; return when the last engine continues.

        Requests of engines that change are prefilled again on the new engine. `stopped_s`: for how long engines that
        change don't run.
        """
        self.run(now)
        kept = {running.engine.key: running for running in self.running}
        staying = [kept.pop(engine.key, None) for engine in engines]
        over_s = max([_end(running, now) for running in kept.values()], default=now)
        resumes_s = over_s + stopped_s
        self._retired += kept.values()
        self.running = [
            stays or self._start(engine, now, resumes_s) for stays, engine in zip(staying, engines, strict=True)
        ]
        waiting = [
            (sequence.arrival_s, name, sequence.index, sequence)
            for running in (*kept.values(), *(stays for stays in staying if stays))
            for name, tenant in running.tenants.items()
            for sequence in _taken(tenant, now, everything=running in kept.values())
        ]
        ahead = sorted([*waiting, *self._ahead], key=lambda entry: entry[:3])
        for _, name, _, sequence in [entry for entry in ahead if entry[0] <= now]:
            self._give(name, sequence, now)
        self._ahead = self._dispatch_single([entry for entry in ahead if entry[0] > now])
        return resumes_s

    def result(self) -> ClusterReplay:
        """Return the requests served so far."""
        every = [tenant for running in (*self._retired, *self.running) for tenant in running.unit.tenants]
        for tenant in every:
            tenant.ledger.check()
        served = {name: tuple(sorted(r.served, key=lambda s: s.index)) for name, r in self._records.items()}
        busy = {phase: sum(tenant.busy_s[phase] for tenant in every) for phase in ("encode", "decode")}
        return ClusterReplay(served, busy, sum(tenant.ledger.preemptions for tenant in every), len(self.running))


def _end(running: RunningEngine, now: float) -> float:
    """Let an engine finish its running iterations, and start no others; return when it has finished."""
    unit = running.unit
    for job in unit.running:
        job.cut(now)
    over_s = max([job.end_s for job in unit.running], default=now)
    unit.close(over_s)
    return over_s


def _taken(tenant: SimulatedTenant, now: float, everything: bool) -> list[Sequence]:
    """Return a tenant's sequences, without their caches.

    Without `everything`, return only those that have not arrived yet.
    """
    ledger = tenant.ledger
    if not everything:
        ahead = [sequence for sequence in ledger.waiting if sequence.arrival_s > now]
        ledger.waiting.remove(ahead)
        return ahead
    residents = ledger.resident
    for sequence in residents:
        ledger.cancel(sequence)
        sequence.recompute(encoder_decoder=False)
    return [*residents, *ledger.waiting.drain()]


def replay_cluster(engines: Items[SharedEngine], requests: Mapping[str, ServiceRequests]) -> ClusterReplay:
    """Run every service's requests on the engines that have it.

    Raises:
        InputError: A pool could not hold a request.
    """
    cluster = SimulatedCluster(engines, requests)
    cluster.run()
    return cluster.result()
