"""The engine: one rank that does what the schedule's policy decides, iteration by iteration."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from exegpt.errors import InputError
from exegpt.models import Model
from exegpt.orders import fcfs
from exegpt.policies import Ledger, Sequence, Step, make_ledger, make_policy
from exegpt.request import FinishReason, Request, Result
from exegpt.schedule import Schedule
from exegpt.served import Served
from exegpt.timeline import Span, Timeline
from xrunner.assembly import Running, assemble
from xrunner.requests import check_request
from xrunner.warm_up import warm_up

_NAP_S = 0.02
"""Longest sleep while no request has arrived, so that a cancellation is noticed."""


@dataclass(frozen=True)
class RunReport:
    """What a run gave. Times in seconds since it began."""

    results: tuple[Result, ...]
    """In order of completion."""
    served: tuple[Served, ...]
    """The finished requests: neither cancelled nor failed."""
    timeline: Timeline
    seconds: float
    """From the beginning to the end of the last iteration."""


class Engine:
    """Enforces a schedule: `policy.next_step` decides, the model computes, `ledger.advance` books.

    InputError where the schedule is for another model or dtype, or its KV cache exceeds this machine's memory.
    """

    def __init__(self, model: Model, schedule: Schedule):
        schedule.check_model(model.spec)
        for name, dtype in (("dtype", schedule.dtype), ("kv_dtype", schedule.kv_dtype)):
            if dtype != model.dtype:
                raise InputError(
                    f"The schedule has {name} {dtype} and the model was loaded in {model.dtype}: load both alike."
                )
        make_policy(schedule)  # refuses at once what can't be run
        self.model = model
        self.schedule = schedule
        self.cache = model.new_cache(schedule.kv_blocks, schedule.block_size)
        self._cancelled: set[str] = set()

    def cancel(self, request_id: str) -> None:
        """End a request of the current run before the next iteration; from any thread. Unknown ids are ignored."""
        self._cancelled.add(request_id)

    def run(self, requests: Rows[Request], on_finish: Callable[[Result], None] | None = None) -> RunReport:
        """Run requests to their ends. `on_finish` gets every result as it comes.

        InputError, before any work, names a request that is too long for the model or the cache, or given twice.
        """
        ledger = make_ledger(self.schedule, make_policy(self.schedule), fcfs)
        running = self._submit(requests, ledger)
        warm_up(self.model, self.cache, ledger.pool, [one.sequence for one in running])
        return _Run(self, ledger, running, on_finish).finish()

    def _submit(self, requests: Rows[Request], ledger: Ledger) -> list[Running]:
        running = []
        seen: set[str] = set()
        for index, request in enumerate(requests):
            check_request(request, self.model.spec)
            if request.id in seen:
                raise InputError(f"Request '{request.id}' is given twice: every request needs its own id.")
            seen.add(request.id)
            need = ledger.pool.blocks_for(len(request.prompt_ids) + request.max_tokens - 1)
            if need > ledger.pool.total:
                raise InputError(
                    f"Request '{request.id}' needs {need} KV blocks, and the schedule's cache has {ledger.pool.total}: "
                    f"shorten it, or tune with more memory."
                )
            sequence = Sequence(index, len(request.prompt_ids), request.max_tokens, request.arrival_s)
            running.append(Running(request, sequence, np.array(request.prompt_ids, dtype=np.int64)))
        ledger.submit(one.sequence for one in running)
        return running


class _Run:
    """One run of an engine: its clock, and what has come of its requests so far."""

    def __init__(
        self, engine: Engine, ledger: Ledger, running: list[Running], on_finish: Callable[[Result], None] | None
    ):
        self.engine = engine
        self.ledger = ledger
        self.policy = make_policy(engine.schedule)
        self.running = running
        self.on_finish = on_finish
        self.results: list[Result] = []
        self.served: list[Served] = []
        self.spans: list[Span] = []
        self.began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.began

    def finish(self) -> RunReport:
        """Iterate until nobody waits and nobody is resident."""
        while True:
            self._drop_cancelled()
            if self.ledger.idle:
                break
            now = self.now()
            step = self.policy.next_step(self.ledger, now)
            if step is None:
                self._wait(now)
            else:
                self._iterate(step, now)
        self.ledger.check()
        timeline = Timeline("measured", tuple(self.spans))
        return RunReport(tuple(self.results), tuple(self.served), timeline, timeline.seconds)

    def _iterate(self, step: Step, start: float) -> None:
        engine = self.engine
        for sequence, _ in step.encode:
            one = self.running[sequence.index]
            one.start_s = start if one.start_s is None else one.start_s
        batch, receivers = assemble(step, self.running, engine.schedule.block_size)
        tokens = engine.model.step(batch, engine.cache).tolist()
        end = self.now()
        self.spans.append(Span(0, 0, step.phase, 0, start, end, len(step.encode) + len(step.decode), step.tokens))
        stopped = set()
        for one, token in zip(receivers, tokens, strict=True):
            if one.sequence.finished:
                continue
            one.output.append(token)
            if one.first_token_s is None:
                one.first_token_s = end
            if token in engine.model.eos and not one.request.ignore_eos:
                one.stopped = True
                stopped.add(one.sequence)
        for sequence in self.ledger.advance(step, stopped):
            self._end(self.running[sequence.index], end)

    def _end(self, one: Running, end: float) -> None:
        self._report(one, "stop" if one.stopped else "length", end)
        start, first = one.start_s, one.first_token_s
        assert start is not None and first is not None, "a finished request has begun"
        request, sequence = one.request, one.sequence
        self.served.append(
            Served(sequence.index, sequence.input_tokens, len(one.output), request.arrival_s, start, first, end)
        )

    def _report(self, one: Running, reason: FinishReason, end: float) -> None:
        request = one.request
        result = Result(
            request.id,
            len(request.prompt_ids),
            tuple(one.output),
            reason,
            request.arrival_s,
            one.start_s,
            one.first_token_s,
            end,
        )
        self.results.append(result)
        if self.on_finish:
            self.on_finish(result)

    def _drop_cancelled(self) -> None:
        asked = self.engine._cancelled
        if not asked:
            return
        cancelled = set()
        while asked:  # one by one: another thread may add meanwhile
            cancelled.add(asked.pop())
        alive = [*self.ledger.waiting, *self.ledger.resident]
        for one in [self.running[sequence.index] for sequence in alive if not sequence.finished]:
            if one.request.id in cancelled:
                self.ledger.cancel(one.sequence)
                self._report(one, "cancelled", self.now())

    def _wait(self, now: float) -> None:
        """Sleep until the next arrival, or a little, so that a cancellation is noticed."""
        arrival = self.ledger.next_arrival(now)
        if arrival is None:
            raise RuntimeError(
                f"policy {self.engine.schedule.policy} runs none of {len(self.ledger.waiting)} waiting requests"
            )
        time.sleep(max(0.0, min(arrival - self.now(), _NAP_S)))
