"""Admission of models that take turns on the same devices: no accepted request to any of them becomes late.

Each model has an `Admission` of its own, whose pace includes the other models' parts of a cycle (`shared_pace.py`). Its
table of starts comes from the continuation of all models' sequences in the unit's event simulator. A request is refused
if it would make another model's accepted request late.

Under overload of several models, none takes all devices: a prediction counts each other model at least with the
sequences that it is entitled to, as far as it has been asked for them. Entitled loads are in proportion to the plan's
rates, and as high as all bounds allow together.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from xcore.arrays import Array
from xcore.requests.engine_protocol import Opened
from xcore.specs.cluster_plan import PlannedModel, Unit
from xmulti.serving.shared_pace import SharedPace
from xmulti.sharing.unit_continuation import UnitContinuation
from xserver.admission.admission_control import Admission, Promise, Refused
from xserver.admission.arrival_rate import ArrivalRate
from xserver.admission.start_table import StartTable, in_order
from xserver.engines.engine_link import Output
from xserver.http.frontend import AdmissionMaker
from xsimulator.replay.continuation import Standing

_FRESH_S = 1.0
"""Seconds for which the starts beside other busy models hold: computing them takes a while."""
_FEW = 0.2
"""Requests within about a bound up to which a model doesn't count as asked for."""
_STEPS = 40
"""Steps of the bisection for entitled loads."""


class SharedAdmission(Admission):
    """Admission control of one model of a unit whose models take turns."""

    def __init__(
        self,
        model: PlannedModel,
        unit: "UnitAdmissions",
        continuation: UnitContinuation,
        opened: Opened,
        outputs: Callable[[], Sequence[Output]],
        max_waiting: int,
        now: Callable[[], float] = time.monotonic,
        usual_input: int = 0,
        lag_s: Callable[[], float] = lambda: 0.0,
    ):
        """Begin without requests; `outputs` are this model's sequences, in order of arrival."""
        super().__init__(opened, outputs, max_waiting, now, usual_input, lag_s)
        self.name, self.rate_seq_s = model.name, model.rate_seq_s
        load, overhead = continuation.loads[self.name], continuation.overhead
        self._pace = self.pace = SharedPace(self._schedule, self._cost, opened.profile, load, overhead, now())
        self._unit, self._continuation = unit, continuation
        self._idle_beside = StartTable(-math.inf, (), 1, None, 0)
        """The latest table for an idle model beside busy ones."""
        self._offers_s = self.bound_s or 1.0
        self._offers = ArrivalRate(self._offers_s)
        self._beside: dict[str, list[Standing]] = {}
        """The other models' sequences at the latest update."""
        self.entitled = 0.0
        """The load that other models' predictions count at least, as far as requests come."""

    @property
    def load(self) -> int:
        """The number of its sequences."""
        return len(self._outputs())

    @property
    def running(self) -> int:
        """The number of its sequences that have a token."""
        return sum(1 for output in self._outputs() if output.tokens)

    # ---- decisions ----

    def admit(self, prompts: Sequence[tuple[int, int]], arrived_s: float, cached: Sequence[int] = ()) -> Promise:
        """Accept the sequences of one request, as `Admission.admit` does."""
        self._offers.come(len(prompts), self._now())
        return super().admit(prompts, arrived_s, cached)

    def _judge(self, prompts: Sequence[tuple[int, int]], arrived_s: float, less: Sequence[float]) -> Promise:
        """Return the promise to a request, or raise Refused; the other models' accepted requests stay in time too."""
        self._unit.changed()
        others = [admission for admission in self._unit.each.values() if admission is not self]
        load, reserved_s = self.load + len(prompts), sum(other.reserved_s for other in others)
        with self.pace.slower_by(reserved_s):
            promise = super()._judge(prompts, arrived_s, less)
            cycle_s = self.pace.token_s(load)
        if not self.load and not any(other.load for other in others):
            return promise  # as `Admission` accepts any request while nothing else runs
        if promise.finish_s > promise.due_s:
            why = f"The answer would take longer than the latency bound of {self.bound_s:g} s."
            raise Refused("latency_bound", why, promise.finish_s - promise.due_s)
        more_s = self.pace.part_s(load) - self.pace.part_s(self.load)
        for other in others:
            late_s, ended_s = other.late_beside(more_s, self.pace.prefills_s([tokens for tokens, _ in prompts]))
            if late_s:
                why = f"Some of {other.load} running requests to '{other.name}' would then miss their bound."
                raise Refused("latency_bound", why, late_s, ended_s, True)
            if load > max(1.0, self.entitled) and other.is_asked and cycle_s > other.most_cycle_s:
                why = f"Requests to '{other.name}', which has a part of the same devices, would then miss their bound."
                raise Refused("latency_bound", why, self._wait_s(promise.tokens, load), 0.0, True)
        return promise

    @property
    def is_asked(self) -> bool:
        """Whether it has recently had requests."""
        return self._offers.rate(self._now()) * self._offers_s > _FEW

    @property
    def reserved_s(self) -> float:
        """Predicted seconds of its part of a cycle at the load to which it is entitled, beyond those at its load."""
        offered = self._offers.rate(self._now()) * self.pace.service_s(round(self._lengths.mean), max(1, self.load))
        reserved = math.ceil(min(self.entitled, offered))
        return max(0.0, self.pace.part_s(reserved) - self.pace.part_s(self.load))

    def late_beside(self, more_s: float, prefills_s: float) -> tuple[float, float]:
        """Return for how long a request to another model would make sequences late, like `Admission._late_s`.

        The request makes each cycle longer by `more_s`, and its prompts take `prefills_s`.
        """
        running = self._outputs()
        if not running or self.bound_s is None:
            return 0.0, 0.0
        left, due_s = self._left(running), np.array([output.due_s - self._now() for output in running])
        waiting_s, _ = self._prefills_s(running, left, ())
        without_s = self._shared_s(left) + waiting_s
        with self.pace.slower_by(more_s):
            ends_s = self._shared_s(left) + waiting_s + prefills_s
        return self._room_s(left, due_s, ends_s, without_s + prefills_s)

    def _prefills_s(self, running: Sequence[Output], left: Sequence[int], less: Sequence[float]) -> tuple[Array, Array]:
        """Return the seconds of prefills, as `Admission` does; the other models' waiting prompts are prefilled too."""
        waiting_s = self.pace.waiting_s
        of_waiting_s, of_all_s = super()._prefills_s(running, left, less)
        return of_waiting_s + waiting_s, of_all_s + waiting_s

    def part_s(self, load: float) -> float:
        """Return the seconds of its part of a cycle on this machine."""
        return self.pace.scale(load) * self.pace.part_s(load)

    @property
    def most_cycle_s(self) -> float:
        """The predicted seconds of a cycle above which 99 of 100 requests would be late, also if they start at once."""
        return (self._within_s - self._first_alone_s) / max(1, self._outputs_p99 - 1)

    def mean_load(self, cycle_s: float) -> float:
        """Return the mean number of its running sequences at its planned rate, if cycles take so long."""
        return (self.rate_seq_s or 1.0) * (self._first_alone_s + self._lengths.mean * cycle_s)

    @property
    def _first_alone_s(self) -> float:
        """The predicted seconds to the first token of a request that doesn't wait."""
        return self.pace.first_s(1) - self.pace.waiting_s

    # ---- measurements ----

    def begun_s(self) -> float:
        """Return the predicted seconds of the prefills that have ended since the last call."""
        begun = [output for output in self._outputs() if output.tokens and not output.is_recorded]
        for output in begun:
            output.is_recorded = True
        return self.pace.prefills_s([len(output.request.prompt_ids) for output in begun])

    def _record(self, now: float, *ended: Output) -> None:
        """Record the prefills and the loads of all models of the unit."""
        self._unit.changed()

    def beside(self, others: Sequence["SharedAdmission"]) -> None:
        """Count the present loads of the other models."""
        busy = [other for other in others if other.load]
        switch_s = self.pace.switch_s if busy else 0.0
        self.pace.others_s = switch_s + sum(other.pace.part_s(other.load) for other in busy)
        self.pace.other_iterations_s = switch_s + sum(other.pace.iteration_s(other.running) for other in busy)
        self.pace.waiting_s = sum(other.waiting_s for other in others)

    @property
    def waiting_s(self) -> float:
        """Predicted seconds of its waiting prompts' prefills."""
        return self.pace.prefills_s([len(o.request.prompt_ids) for o in self._outputs() if not o.tokens])

    # ---- starts ----

    def _idle_table(self, now: float) -> StartTable:
        """Return the table for requests that come while the model has none: the other models may be busy."""
        others = {name: other._standing() for name, other in self._unit.each.items() if other is not self}
        if not any(others.values()):
            self._beside = {}
            return super()._idle_table(now)
        if now - self._idle_beside.made_s > _FRESH_S:
            self._beside = others
            self._idle_beside = StartTable(now, *self._starts([]), first=0)
        return replace(self._idle_beside, first=self._accepted)

    async def update(self) -> None:
        """Compute a new table, unless one is being computed, or no bound needs it."""
        if not self._computing:
            self._beside = {name: other._standing() for name, other in self._unit.each.items() if other is not self}
            self._unit.entitle()
        await super().update()

    def _standing(self) -> list[Standing]:
        """Return the model's sequences, in order of arrival."""
        now, rows = self._now(), zip(super()._standing(), self._outputs(), strict=True)
        return [replace(row, arrival_s=min(0.0, output.added_s - now)) for row, output in rows]

    def _starts(self, standing: list[Standing]) -> tuple[tuple[float, ...], int, float | None]:
        """Return the starts, the round and its time of a `StartTable`, by the continuation of all models."""
        assert self.bound_s is not None
        running = [row for row in standing if row.generated]
        waiting = [row for row in standing if not row.generated]
        typical, pool = round(self._inputs.mean), self._continuation.loads[self.name].pool
        most = max(1, min(self._outputs_p99, pool.total * pool.block_size - typical))
        places = math.ceil(self.pace.most)
        count = max(places, 2 * places - len(waiting))
        beyond = [Standing(typical, most, self._lengths.supposed(n, 0, most)) for n in range(count)]
        everything = {**self._beside, self.name: [*running, *waiting, *beyond]}
        after = self._continuation.run(everything, self.bound_s)[self.name]
        starts, round_s = in_order([c.start_s for c in after[len(running) :]], places)
        return tuple(starts.tolist()), places, round_s


Accept = Callable[[AdmissionMaker], None]
"""Lets a frontend accept requests, with an admission that it makes from its own arguments."""


class UnitAdmissions:
    """The admissions of the models of a unit, which begin when all models have opened."""

    def __init__(self, unit: Unit, now: Callable[[], float] = time.monotonic):
        """Wait for the models of a unit; `now` is the clock of all."""
        self._now = now
        self._unit = {model.name: model for model in unit}
        self._opened: dict[str, tuple[Opened, Accept]] = {}
        self.each: dict[str, SharedAdmission] = {}
        """By model name."""

    def opened(self, name: str, opened: Opened, accept: Accept) -> None:
        """Record that a model has opened; if all have, let all accept requests."""
        if name in self._opened:  # of an earlier engine
            self._opened.clear()
        self._opened[name] = opened, accept
        if len(self._opened) < len(self._unit):
            return
        profiles = {each: of_model.profile for each, (of_model, _) in self._opened.items()}
        continuation = UnitContinuation(tuple(self._unit.values()), profiles)
        for each, (_, begin) in self._opened.items():
            begin(partial(self._make, self._unit[each], continuation))
        self.entitle()

    def _make(
        self,
        model: PlannedModel,
        continuation: UnitContinuation,
        opened: Opened,
        outputs: Callable[[], Sequence[Output]],
        max_waiting: int,
        *,
        usual_input: int = 0,
        lag_s: Callable[[], float] = lambda: 0.0,
    ) -> Admission:
        arguments = opened, outputs, max_waiting, self._now, usual_input, lag_s
        admission = SharedAdmission(model, self, continuation, *arguments)
        self.each[model.name] = admission
        return admission

    def changed(self) -> None:
        """Count the models' present loads in all predictions."""
        every = list(self.each.values())
        now_s = self._now()
        prefills_s = sum(admission.begun_s() for admission in every)
        for admission in every:
            admission.pace.passed(admission.running, now_s, prefills_s)
        for admission in every:
            admission.beside([other for other in every if other is not admission])

    def entitle(self) -> None:
        """Set the loads to which models are entitled: the highest ones in proportion to their rates within all bounds.

        All running sequences get one token per cycle, so the tightest bound limits the cycle.
        """
        every = list(self.each.values())
        cycle_s = min(admission.most_cycle_s for admission in every)
        if math.isinf(cycle_s):
            return
        if cycle_s <= 0:  # no load keeps the tightest bound
            for admission in every:
                admission.entitled = 0.0
            return
        asked = [admission.mean_load(cycle_s) for admission in every]
        low, high = 0.0, min(a.pace.most / load for a, load in zip(every, asked, strict=True))
        for _ in range(_STEPS):
            factor = (low + high) / 2
            fits = sum(a.part_s(factor * load) for a, load in zip(every, asked, strict=True)) <= cycle_s
            low, high = (factor, high) if fits else (low, factor)
        for admission, load in zip(every, asked, strict=True):
            admission.entitled = low * load
