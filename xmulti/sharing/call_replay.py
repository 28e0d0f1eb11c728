"""An application's calls through a plan: each begins when the calls that it reads have ended, on any engine.

The engines share one event queue, so that the end of a call on one engine can be an arrival on another.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from itertools import cycle

from xcore.batching import UNKNOWN, Sequence
from xcore.specs.cluster_plan import Plan, PlannedModel
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimes
from xcore.specs.schedule import Schedule
from xmulti.files.dependent_calls import Chain, DependentCalls
from xmulti.sharing.plan_replay import CONTENTION, loads_of, order_of, overhead_of, rule_of
from xmulti.sharing.replay import empty_tenant
from xmulti.sharing.simulated_unit import SimulatedUnit
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.event_queue import Actor, events
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica, micro_batching_of

Submit = Callable[[Sequence], None]
"""Takes a model's requests."""


@dataclass(frozen=True)
class CallReplay:
    """The results of the calls."""

    served: dict[str, tuple[RequestTimes, ...]]
    """By model, in order of completion."""
    finish_s: dict[str, float]
    """By call: when it ended."""

    @property
    def seconds(self) -> float:
        """Seconds until the last call has ended."""
        return max(self.finish_s.values(), default=0.0)


def replay_calls(
    plan: Plan,
    profiles: Mapping[str, Profile],
    calls: DependentCalls[int],
    model_of: Mapping[str, str],
    output_of: Callable[[Chain[int], int], int],
) -> CallReplay:
    """Run all calls through a plan.

    `model_of` maps each node to the plan's model. `output_of` returns the output tokens of a call, given its prompt's
    tokens.

    Raises:
        InputError: A model's cache could not hold a call.
    """
    count = {model.name: 0 for model in plan.models}
    records = {model.name: _record(model, profiles[model.name], calls.left) for model in plan.models}
    hints = {model.name: order_of(model, profiles[model.name])[1] or UNKNOWN for model in plan.models}
    engines, submit = _engines(plan, profiles, records)
    finish_s: dict[str, float] = {}
    running: dict[tuple[str, int], Chain[int]] = {}
    seen = dict.fromkeys(records, 0)

    def begin(chains: Items[Chain[int]], now: float) -> None:
        for chain in chains:
            name, prompt = model_of[chain.node.name], calls.prompt(chain)
            output = output_of(chain, prompt)
            submit[name](Sequence(count[name], prompt, output, now, hints=hints[name]))
            running[name, count[name]] = chain
            count[name] += 1

    begin(calls.begin(), 0.0)
    for _ in events(engines):
        for name, record in records.items():
            for served in record.served[seen[name] :]:
                chain = running.pop((name, served.index))
                finish_s[chain.name] = served.finish_s
                begin(calls.end(chain, served.output_tokens), served.finish_s)
            seen[name] = len(record.served)
    by_time = {n: tuple(sorted(r.served, key=lambda s: (s.finish_s, s.index))) for n, r in records.items() if seen[n]}
    return CallReplay(by_time, finish_s)


def _record(model: PlannedModel, profile: Profile, most: int) -> Record:
    schedule = model.schedule
    encoder_decoder = schedule.model.spec.encoder_layers > 0
    return Record(most, micro_batching_of(schedule).index, encoder_decoder, profile.front_end_s)


def _engines(
    plan: Plan, profiles: Mapping[str, Profile], records: Mapping[str, Record]
) -> tuple[list[Actor], dict[str, Submit]]:
    """Return the plan's engines, and the function that takes each model's requests."""
    engines: list[Actor] = []
    submit: dict[str, Submit] = {}
    for unit in plan.units:
        if unit[0].share is None:
            (model,) = unit
            replicas = _replicas(model.schedule, profiles[model.name], records[model.name])
            engines += replicas
            submit[model.name] = _in_turn(replicas)
            continue
        tenants = [empty_tenant(load, records[load.name]) for load in loads_of(unit, profiles, {})]
        shared = SimulatedUnit(tenants, rule_of(unit[0].share), CONTENTION, overhead_of(unit, profiles))
        engines.append(shared)
        submit |= {tenant.name: partial(shared.submit, tenant) for tenant in tenants}
    return engines, submit


def _replicas(schedule: Schedule, profile: Profile, record: Record) -> list[Replica]:
    """Return the replicas of a model with separate devices.

    They run one iteration at a time: a call may arrive during a row of iterations.
    """
    cost, micro_batching = ReplicaCost.of(schedule, profile), micro_batching_of(schedule)
    return [
        Replica(schedule, cost, record, micro_batching, number, step_by_step=True)
        for number in range(schedule.replicas)
    ]


def _in_turn(replicas: Items[Replica]) -> Submit:
    """Return a function that gives each request to the next replica, as an open engine does."""
    turns = cycle(replicas)
    return lambda sequence: next(turns).submit(sequence)
