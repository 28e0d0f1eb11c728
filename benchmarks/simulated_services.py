"""Two services that take turns on one device, under bounds, in simulated time: offered load, accepted and late answers.

Admission control decides as in `exegpt serve --plan`. Its engine is the unit of the event simulator, with the true
lengths. The offered load is a multiple of the highest rates, in proportion, at which a replay without admission keeps
both bounds for 99 % of all requests, divided by the machine's slowdown. Run as

    python -m benchmarks.simulated_services
"""

import asyncio
import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from xcore.batching import Hints, Sequence
from xcore.batching.sequence import FINISHED
from xcore.policies.orca import OrcaControl
from xcore.requests.engine_protocol import Opened
from xcore.requests.request import Request
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import PlannedModel, Share, Unit
from xcore.specs.profile import Profile
from xcore.specs.request_times import summarise
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import RequestLengths, task
from xmulti.serving.shared_admission import UnitAdmissions
from xmulti.sharing.plan_replay import replay_models
from xmulti.sharing.replay import empty_tenant
from xmulti.sharing.simulated_unit import SimulatedUnit
from xmulti.sharing.unit_loads import CONTENTION, loads_of, overhead_of, rule_of
from xprofiler.roofline import roofline_profile
from xserver.admission.admission_control import Admission, Promise
from xserver.engines.engine_link import Output
from xserver.http.api_error import ApiError
from xserver.http.frontend import AdmissionMaker
from xsimulator.replay.event_queue import events
from xsimulator.replay.record import Record

TABLE_S = 0.5
"""Simulated seconds between two of admission's tables; their computation takes no simulated time."""


class SimulatedServices:
    """Admission control of a unit's models, whose engine is the unit in simulated time, with the true lengths."""

    def __init__(self, unit: Unit, profiles: Mapping[str, Profile], requests: int, slowdown: float = 1.0):
        """Create an idle server for at most `requests` requests to each model, whose indices are less than that.

        `slowdown`: how much longer iterations take than predicted.
        """
        loads = loads_of(unit, profiles, {})
        records = {load.name: Record(requests, lambda _: 0, False) for load in loads}
        self._tenants = {load.name: empty_tenant(load, records[load.name]) for load in loads}
        rule, overhead = rule_of(unit[0].share or Share("time")), slowdown * overhead_of(unit, profiles)
        self._unit = SimulatedUnit(list(self._tenants.values()), rule, CONTENTION, overhead, step_by_step=True)
        self.now_s, self._next_table_s = 0.0, 0.0
        self._running: dict[str, dict[int, tuple[Output, Sequence]]] = {name: {} for name in records}
        self.finished: dict[str, list[tuple[Output, float]]] = {name: [] for name in records}
        """Each model's finished requests, and when their last tokens came."""
        self.admissions: dict[str, Admission] = {}
        together = UnitAdmissions(unit, lambda: self.now_s)
        for model in unit:
            opened = Opened(model.schedule, profiles[model.name], None, (), 0.0)

            together.opened(model.name, opened, partial(self._accept, model.name, opened))

    def _accept(self, name: str, opened: Opened, make: AdmissionMaker) -> None:
        self.admissions[name] = make(opened, partial(self._outputs, name), 1000)

    def _outputs(self, name: str) -> list[Output]:
        return [output for output, _ in self._running[name].values()]

    def run(self, until: float = math.inf) -> None:
        """Run the unit up to a time in seconds, or until nothing is left."""
        for now_s in events([self._unit], until):
            self.now_s = now_s
            for name in self._running:
                self._receive(name)
            if now_s >= self._next_table_s:
                self._next_table_s = now_s + TABLE_S
                for admission in self.admissions.values():
                    asyncio.run(admission.update())
        if until < math.inf:
            self.now_s = until

    def _receive(self, name: str) -> None:
        """Report a model's tokens and ends to its admission."""
        stepped = False
        for index, (output, sequence) in list(self._running[name].items()):
            if sequence.generated > len(output.tokens):
                stepped = True
                output.first_s, output.last_s = output.first_s or self.now_s, self.now_s
                output.tokens = [0] * sequence.generated
            if sequence.status is FINISHED:
                del self._running[name][index]
                self.admissions[name].ended(output)
                self.finished[name].append((output, self.now_s))
        if stepped:
            self.admissions[name].stepped()

    def send(self, name: str, request: Request, output_tokens: int) -> Promise:
        """Send a request, whose id is its index and whose true length is `output_tokens`; ApiError if it is refused."""
        inputs = len(request.prompt_ids)
        promise = self.admissions[name].admit([(inputs, request.max_tokens)], self.now_s)
        hints = Hints(slack_s=promise.slack_s)
        sequence = Sequence(int(request.id), inputs, request.max_tokens, self.now_s, output_tokens, hints=hints)
        output = Output(request, added_s=self.now_s, due_s=promise.due_s)
        self._running[name][sequence.index] = output, sequence
        self._unit.submit(self._tenants[name], sequence)
        return promise


CAPACITY = 6.88
"""`capacity` of `services()` in 120 s."""
_CLUSTER = parse_cluster("1xA100-80GB")
RATES = {"chat": 2.0, "summary": 1.0}
"""Requests/s of each service, in proportion; the benchmark multiplies them."""
LENGTHS = {"chat": task("T"), "summary": task("S")}
BOUNDS_S = {"chat": 20.0, "summary": 8.0}
_MODELS = {"chat": builtin_model("llama-2-7b"), "summary": builtin_model("opt-13b")}
PROFILES = {name: roofline_profile(model, _CLUSTER) for name, model in _MODELS.items()}


def services(pool: Literal["quotas", "merged"] = "quotas", kv_blocks: int = 1600) -> Unit:
    """Return the two services on one device."""
    models = []
    for name, model in _MODELS.items():
        schedule = Schedule(
            version=Schedule.VERSION,
            policy="orca",
            control=OrcaControl(max_num_seqs=256, prefills_per_step=4),
            model=ModelReference(model, model.fingerprint),
            cluster=_CLUSTER,
            workload=LENGTHS[name],
            profile=ProfileReference("roofline", "0"),
            stages=(Stage((0,), 1, "both", None, (0, model.layers)),),
            kv_blocks=kv_blocks,
            dtype="fp16",
            kv_dtype="fp16",
            admission="grow",
            latency_bound_s=BOUNDS_S[name],
        )
        models.append(
            PlannedModel(name, (0,), schedule, summarise((), 0.0), RATES[name], share=Share("time", pool=pool))
        )
    return tuple(models)


def arrivals(unit: Unit, factor: float, seconds: float, seed: int = 0) -> dict[str, list[RequestLengths]]:
    """Return Poisson arrivals for a time, at the services' rates times a factor."""
    requests = {}
    for place, model in enumerate(unit):
        rng, lengths = np.random.default_rng([seed, place]), model.schedule.workload
        rate = factor * (model.rate_seq_s or 1.0)
        times = np.cumsum(rng.exponential(1 / rate, round(2 * rate * seconds) + 50))
        times = times[times < seconds].tolist()
        inputs, outputs = (
            side.sample(len(times), rng).astype(int).tolist() for side in (lengths.input, lengths.output)
        )
        requests[model.name] = list(map(RequestLengths, inputs, outputs, times))
    return requests


def capacity(unit: Unit, profiles: Mapping[str, Profile], seconds: float, most: float = 64.0) -> float:
    """Return the highest factor of the rates, to 2 %, at which 99 % of all requests to each service are in time."""
    low, high = 0.0, most
    while high - low > 0.02 * high:
        factor = (low + high) / 2
        served = replay_models(unit, profiles, arrivals(unit, factor, seconds))
        shares = [
            np.mean(
                [
                    s.finish_s - s.arrival_s <= (model.schedule.latency_bound_s or math.inf)
                    for s in served[model.name].served
                ]
            )
            for model in unit
        ]
        low, high = (factor, high) if min(shares) >= 0.99 else (low, factor)
    return low


@dataclass(frozen=True)
class Answers:
    """One service's answers."""

    offered: int
    accepted: int
    late: int
    goodput_seq_s: float
    """Answers in time per second of the time in which requests arrived."""


def served(
    unit: Unit, profiles: Mapping[str, Profile], factor: float, seconds: float, slowdown: float = 1.0, seed: int = 1
) -> dict[str, Answers]:
    """Serve arrivals at a factor of the rates for a time; refused requests don't come again."""
    requests = arrivals(unit, factor, seconds, seed)
    server = SimulatedServices(unit, profiles, max(map(len, requests.values())), slowdown)
    ahead = sorted((r.arrival_s, name, i) for name, rows in requests.items() for i, r in enumerate(rows))
    for arrival_s, name, i in ahead:
        server.run(arrival_s)
        asked, most = requests[name][i], next(m for m in unit if m.name == name).schedule.workload.output.max
        with contextlib.suppress(ApiError):
            server.send(name, Request(str(i), (1,) * asked.input, int(most)), asked.output)
    server.run()
    answers = {}
    for model in unit:
        finished, bound_s = server.finished[model.name], model.schedule.latency_bound_s or math.inf
        late = sum(end_s - output.added_s > bound_s for output, end_s in finished)
        answers[model.name] = Answers(len(requests[model.name]), len(finished), late, (len(finished) - late) / seconds)
    return answers


def main() -> None:
    """Print both services' answers by offered load."""
    seconds = 120.0
    unit = services()
    highest = capacity(unit, PROFILES, seconds)
    print(f"capacity: {highest:.3g} times the rates")
    print("load  slowdown  service   offered  accepted  late  goodput/s")
    for slowdown in (1.0, 1.3):
        for load in (0.5, 1.0, 2.0, 4.0):
            for name, of in served(unit, PROFILES, load * highest / slowdown, seconds, slowdown).items():
                figures = f"{of.offered:7,}  {of.accepted:8,}  {of.late:4,}  {of.goodput_seq_s:9.3g}"
                print(f"{load:4g}  {slowdown:8g}  {name:8}  {figures}")


if __name__ == "__main__":
    main()
