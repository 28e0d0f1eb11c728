"""An application's calls through a plan: each begins when the calls that it reads have ended, wherever those ran.

Engines go on side by side in simulated time, one event after the other over all of them, so that a call that one engine
ends can be another one's next arrival.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf
from typing import Protocol

from exegpt.batching import UNKNOWN, Hints, MicroBatching, Sequence
from exegpt.dependent_calls import Chain, DependentCalls
from exegpt.orders import fcfs
from exegpt.plan import Plan, PlannedModel
from exegpt.policies import make_ledger, make_policy
from exegpt.profile import Profile
from exegpt.served import Served
from xsimulator.cost.replica import ReplicaCost
from xsimulator.multimodel.plan_replay import CONTENTION, loads_of, order_of, overhead_of, rule_of
from xsimulator.multimodel.replay import empty_tenant
from xsimulator.multimodel.unit import Unit
from xsimulator.replay.event_simulator import keys_of, sides_of
from xsimulator.replay.lanes import KVTransfer, Lane
from xsimulator.replay.record import Record


class Engine(Protocol):
    """Devices with their models, in simulated time."""

    def next_event(self) -> float:
        """When something happens next; endless where nothing does."""

    def act(self) -> None:
        """Let it happen."""

    def submit(self, model: str, sequence: Sequence) -> None:
        """A request arrives, no sooner than what has happened last."""


@dataclass(frozen=True)
class CallReplay:
    """What the calls experienced."""

    served: dict[str, tuple[Served, ...]]
    """By model, in order of completion."""
    finish_s: dict[str, float]
    """By call: when it ended."""

    @property
    def seconds(self) -> float:
        """Until the last call has ended."""
        return max(self.finish_s.values(), default=0.0)


def replay_calls(
    plan: Plan,
    profiles: Mapping[str, Profile],
    calls: DependentCalls[int],
    model_of: Mapping[str, str],
    output_of: Callable[[Chain[int], int], int],
) -> CallReplay:
    """Run all calls through a plan. `model_of` each node the plan's model, `output_of` a call and its prompt's tokens
    those of its output. InputError for a call that its model's cache could not hold.
    """
    count = {model.name: 0 for model in plan.models}
    records = {model.name: _record(model, calls.left) for model in plan.models}
    engines = _engines(plan, profiles, records)
    finish_s: dict[str, float] = {}
    running: dict[tuple[str, int], Chain[int]] = {}
    seen = dict.fromkeys(records, 0)

    def begin(chains: Items[Chain[int]], now: float) -> None:
        for chain in chains:
            name, prompt = model_of[chain.node.name], calls.prompt(chain)
            output = output_of(chain, prompt)
            engines[name].submit(name, Sequence(count[name], prompt, output, now))
            running[name, count[name]] = chain
            count[name] += 1

    begin(calls.begin(), 0.0)
    every = list(dict.fromkeys(engines.values()))
    while calls.left:
        at, engine = min([(engine.next_event(), place) for place, engine in enumerate(every)])
        if at == inf:
            raise RuntimeError("a call that waits can never be admitted")
        every[engine].act()
        for name, record in records.items():
            for served in record.served[seen[name] :]:
                chain = running.pop((name, served.index))
                finish_s[chain.name] = served.finish_s
                begin(calls.end(chain, served.output_tokens), served.finish_s)
            seen[name] = len(record.served)
    by_time = {n: tuple(sorted(r.served, key=lambda s: (s.finish_s, s.index))) for n, r in records.items() if seen[n]}
    return CallReplay(by_time, finish_s)


def _record(model: PlannedModel, most: int) -> Record:
    schedule = model.schedule
    batching = _micro_batching(model)
    return Record(most, batching.index, schedule.model.spec.encoder_layers > 0)


def _micro_batching(model: PlannedModel) -> MicroBatching:
    schedule = model.schedule
    decoding = sum(1 for stage in schedule.stages if stage.phase != "encode")
    return MicroBatching(schedule.micro_batches or decoding, schedule.encode_micro_batches, schedule.replicas)


def _engines(plan: Plan, profiles: Mapping[str, Profile], records: Mapping[str, Record]) -> dict[str, Engine]:
    """By model; models that share devices have the same."""
    engines: dict[str, Engine] = {}
    for unit in plan.units:
        if unit[0].share is None:
            (model,) = unit
            engines[model.name] = Alone(model, profiles[model.name], records[model.name])
            continue
        tenants = [empty_tenant(load, records[load.name]) for load in loads_of(unit, profiles, {})]
        hints = {model.name: order_of(model, profiles[model.name])[1] or UNKNOWN for model in unit}
        shared = Shared(Unit(tenants, rule_of(unit[0].share), CONTENTION, overhead_of(unit)), hints)
        engines |= {model.name: shared for model in unit}
    return engines


class Shared:
    """Models that share devices."""

    def __init__(self, unit: Unit, hints: Mapping[str, Hints]):
        """`hints`: what is known of each model's requests."""
        self._unit, self._hints = unit, hints
        self._ledgers = {tenant.name: tenant.ledger for tenant in unit.tenants}

    def next_event(self) -> float:
        """When a job ends or a request arrives."""
        return self._unit.next_event()

    def act(self) -> None:
        """End the jobs that end then."""
        self._unit.advance(self._unit.next_event())

    def submit(self, model: str, sequence: Sequence) -> None:
        """A request of one of the models."""
        sequence.hints = self._hints[model]
        self._ledgers[model].submit([sequence])


class Alone:
    """A model with devices of its own; its replicas take requests in turns, as an open engine's do."""

    def __init__(self, model: PlannedModel, profile: Profile, record: Record):
        self._schedule, cost = model.schedule, ReplicaCost.of(model.schedule, profile)
        self._replicas: list[list[Lane]] = []
        self._given = 0
        for replica in range(self._schedule.replicas):
            policy, ledger = make_policy(self._schedule, None), make_ledger(self._schedule, fcfs)
            sides, transfer = sides_of(cost, _micro_batching(model), False, replica), KVTransfer(cost)
            # iterations one by one: a call may arrive in the midst of a row
            self._replicas.append(
                [Lane(policy, ledger, record, side, phase, transfer, True) for phase, side in sides.items()]
            )

    def next_event(self) -> float:
        """When a lane acts."""
        return self._next()[0]

    def act(self) -> None:
        """Let it act."""
        now, _, place, number = self._next()
        lanes = self._replicas[place]
        others = [lane for lane in lanes if lane is not lanes[number]]
        if lanes[number].act(now, min([lane.event[0] for lane in others], default=inf)):
            for lane in others:
                lane.wake(now)

    def _next(self) -> tuple[float, int, int, int]:
        return min(
            [
                (*lane.event[:2], place, number)
                for place, lanes in enumerate(self._replicas)
                for number, lane in enumerate(lanes)
            ]
        )

    def submit(self, model: str, sequence: Sequence) -> None:
        """A request of the model."""
        lanes = self._replicas[self._given % len(self._replicas)]
        self._given += 1
        if self._schedule.prefix_caching:
            sequence.keys = keys_of(sequence, self._schedule.block_size, ())
        lanes[0].ledger.submit([sequence])
        for lane in lanes:
            if lane.waits and lane.phase != "decode":
                lane.at = min(lane.at, sequence.arrival_s)
