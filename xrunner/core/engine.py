"""The engine: enforces a schedule on this rank alone, or on all ranks of a job, and stays open for requests."""

from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as Rows
from functools import cached_property
from pathlib import Path

import torch

from xcore.batching import Hints, Ledger, Order, Preemption, deal
from xcore.batching.kv_capacity import blocks_needed, grow_to_fit
from xcore.batching.step import StagePhase
from xcore.errors import InputError, TooLong
from xcore.frozen_heap import frozen_heap
from xcore.orders import fcfs
from xcore.requests.engine_protocol import EngineLoad, Event
from xcore.requests.grammar import Grammars
from xcore.requests.request import Request, Result
from xcore.requests.requests import check_request
from xcore.specs.change import Change, Reschedule
from xcore.specs.schedule import Schedule, devices
from xcore.specs.timeline import Span
from xrunner.comm.gpu import Gpu
from xrunner.comm.place import Place
from xrunner.comm.ranks import Agreed, Ranks
from xrunner.comm.transport import SPANS, Transport
from xrunner.core.adaptation import Adaptation
from xrunner.core.capacity import cache_blocks, cache_bytes, check_buffers, check_memory
from xrunner.core.compiling import Compiling
from xrunner.core.driver import Driver, Options
from xrunner.core.job_setup import check_schedule, gpu_of, job_facts, load_part, make_transport, on_device
from xrunner.core.outputs import Outputs
from xrunner.core.replicas import Follower, Leader
from xrunner.core.run_report import RunReport
from xrunner.core.shared_cache import SharedCache
from xrunner.models import KVCache, Model
from xrunner.models.device import CPU
from xrunner.rank.warm_up import Extent, check_logits, warm_up
from xrunner.rank.worker import END, Worker, serve

DEFAULT = Options()
Share = list[tuple[int, Request]]
"""A replica's requests, with their places in the complete list."""


class Engine:
    """Enforces a schedule: the policy decides, the ranks compute, the ledger books.

    `model` is this rank's part of the model, and `transport` its connection to the other `ranks`. A single rank has the
    whole model. The engine works on the model's device, through `gpu` if it isn't the CPU. `tokenizer` is the model's
    tokenizer.json, which grammars need. `shared` has the engine's KV blocks if several models share one memory.

    Raises:
        InputError: The schedule is for another model or dtype, or KV caches exceed their device's memory.
    """

    def __init__(
        self,
        model: Model,
        schedule: Schedule,
        ranks: Ranks | None = None,
        transport: Transport | None = None,
        since: float | None = None,
        gpu: Gpu | None = None,
        tokenizer: Path | None = None,
        shared: SharedCache | None = None,
    ):
        self._model: Model | None = model
        self.schedule = schedule
        self.ranks = ranks or Ranks()
        self._tokenizer = tokenizer
        self.transport = transport
        self.place = Place(schedule, self.ranks.rank)
        self.ranks.attempt(lambda: check_schedule(schedule, model, self.ranks.size))
        gpu = gpu or gpu_of(model.device)
        self._device, self._gpu, self._attention = model.device, gpu, model.attention
        self._shared = shared
        cache = shared.cache if shared else self._new_cache(model)
        self._worker: Worker | None = Worker(model, cache, self.place, transport, gpu)
        self._clock = self.ranks.clock()
        self._since = since
        self.began = 0.0
        """When the latest run began, by the ranks' clock."""
        self._aborted: dict[str, int | None] = {}
        self._driver: Driver | None = None
        self._replicas: Leader | Follower | None = None
        self._events: list[Event] = []
        self._added = 0
        self._unfinished: dict[str, Request] = {}
        """Added requests whose results have not been returned, by their ids."""
        self._closed = False

    def _new_cache(self, model: Model) -> KVCache:
        blocks = cache_blocks(self.place, model.spec) + (self._gpu is not None)  # one for padding rows
        what = f"A KV cache of {self.schedule.kv_blocks} blocks on each rank"
        check_memory(model.device, self.ranks, what, cache_bytes(model, self.schedule, blocks))
        return model.new_cache(blocks, self.schedule.block_size)

    @staticmethod
    def load(
        directory: str | Path,
        schedule: Schedule,
        ranks: Ranks,
        since: float | None = None,
        device: torch.device = CPU,
        attention: str = "triton",
        shared: SharedCache | None = None,
    ) -> "Engine":
        """Load this rank's engine with its part of the model in a directory; all ranks of a job call it alike.

        The engine continues a run that began at `since`, by the ranks' clock; None: a new run begins. `attention` as in
        `Model`, `shared` as in `Engine`.

        Raises:
            InputError: On all ranks, if they disagree, the schedule can't be run so, or a part can't be read.
        """
        ranks.agree(lambda: job_facts(directory, schedule, ranks) | on_device(schedule, device, attention))
        place, gpu = Place(schedule, ranks.rank), gpu_of(device)
        transport = make_transport(ranks, place, gpu) if ranks.size > 1 else None
        try:
            model = ranks.attempt(lambda: load_part(directory, place, transport, device, attention))
            tokenizer = Path(directory) / "tokenizer.json"
            return Engine(model, schedule, ranks, transport, since, gpu, tokenizer, shared)
        except Agreed:  # every rank is here
            if transport:
                transport.close()
            raise

    @property
    def leads(self) -> bool:
        """Whether this rank gets all results and the report: the first replica's driver."""
        return self.place.rank == self.place.driver and self.place.replica == 0

    def onward(self, directory: str | Path, schedule: Schedule) -> "Engine":
        """Continue this run under another schedule in a new engine; all ranks call it alike.

        Keeps the weights if stages are unchanged; pending aborts carry over. Nothing more can be run by this engine.

        Raises:
            InputError: On all ranks, if the schedule can't be run; another schedule may be tried afterwards.
        """
        model = self._release()
        if model is None or schedule.stages != self.schedule.stages:
            del model
            self.close()
            engine = Engine.load(directory, schedule, self.ranks, self.began, self._device, self._attention)
        else:
            try:
                engine = Engine(model, schedule, self.ranks, self.transport, self.began, self._gpu, self._tokenizer)
            except InputError:
                self._model = model
                raise
        engine._aborted = self._aborted
        return engine

    def close(self) -> None:
        """Free this rank's memory and what the ranks share; nothing more can be run.

        All ranks call it, also after a run that raised Agreed.
        """
        self._release()
        if self.transport and not self._closed:
            self.transport.close()
        self._closed = True

    def _release(self) -> Model | None:
        """Return the weights, so that the next engine can own them; None if they are gone. The cache is freed."""
        if self._worker:
            self._worker.between = lambda: None  # the driver's, which has the worker: a cycle would keep the cache
        model, self._model, self._worker, self._driver, self._replicas = self._model, None, None, None, None
        return model

    @property
    def model(self) -> Model:
        """This rank's part of the model; RuntimeError once another engine has it."""
        if self._model is None:
            raise RuntimeError("this engine is closed: its weights have gone")
        return self._model

    @property
    def worker(self) -> Worker:
        """This rank's layers at work; RuntimeError once the engine is closed."""
        if self._worker is None:
            raise RuntimeError("this engine is closed: its cache has gone")
        return self._worker

    def open(self, extent: Extent, options: Options = DEFAULT, reschedule: Reschedule | None = None) -> None:
        """Prepare for requests within an extent; all ranks call it alike.

        With `reschedule`, another schedule takes over when lengths drift. If that schedule needs another engine,
        requests that haven't begun are left to it (`changes.run_adapting`).
        """
        check_buffers(self.model, self.place, self.ranks, extent, options.preemption)
        worker, running = self.worker, self._since is not None
        compute = worker.compute
        cache = self._unused_cache()
        warm_up(self.model, cache, extent, compute.graphs, running, worker.gpu, compute.planning)
        if not running:
            self.ranks.agree(lambda: check_logits(self.model, cache, self.place.before is None, compute.planning))
        shown = options.spans and self.place.part == 0  # the other ranks of a tensor-parallel group have the same spans
        leader = None if self.leads or options.record else Place(self.schedule, 0).driver
        worker.begin(self._clock, options.record or shown, leader)
        zero = self.ranks.all(self._clock())[0] if self._since is None else self._since
        self.count_from(zero)
        if self.place.rank == self.place.driver:
            self._drive(options, reschedule)

    def count_from(self, zero: float) -> None:
        """Set the beginning of the run to `zero`, by the ranks' clock."""
        clock = self._clock  # not self: without a cycle, an unused engine is freed at once, with its graphs and cache
        self.began, self.worker.now = zero, lambda: clock() - zero

    def _unused_cache(self) -> KVCache:
        """Return a cache that a warm-up may write to: other models may already use a shared one."""
        return self.model.new_cache(1, self.schedule.block_size) if self._shared else self.worker.cache

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars of the engine's requests, on the driver's rank."""
        model = self.worker.model
        return Grammars(self._tokenizer, model.eos, model.spec.vocab)

    def prepare_grammars(self) -> None:
        """Read the tokenizer for grammars now, so that no running request waits for it."""
        if self._driver:
            self.grammars.prepare()

    def _drive(self, options: Options, reschedule: Reschedule | None) -> None:
        """Make this replica's driver and its connection to the drivers of the other replicas."""
        size, replicas = devices(self.schedule), range(self.schedule.replicas)
        first, *others = (Place(self.schedule, size * replica).driver for replica in replicas)
        if self.leads:
            self._replicas = leader = Leader(self.transport, others, self._events.append)
            driver = self._driver = self._driver_of(leader.emit, options)
            driver.elsewhere = leader.abort
            if reschedule:
                adaptation = Adaptation(self.schedule, reschedule, leader.broadcast, options.promises)
                driver.look, driver.outputs.drift = adaptation.look, adaptation.drift
        else:
            assert self.transport, "a rank alone leads"
            self._replicas = follower = Follower(self.transport, first)
            driver = self._driver = self._driver_of(follower.emit, options)
            driver.look = follower.look

    def _driver_of(self, emit: Callable[[Event], None], options: Options) -> Driver:
        keyed = self.schedule.block_size if self.schedule.prefix_caching else None
        model = self.worker.model
        outputs = Outputs(model.eos, model.spec.vocab, self.grammars, emit, options.stream, options.record, keyed)
        pool = self._shared.pool if self._shared else None
        return Driver(self.worker, self.schedule, self._aborted, outputs, options, pool)

    def add(self, request: Request) -> int | None:
        """Add a request, which runs as soon as the policy admits it; on the leader, from the thread that steps.

        Return the number of cached tokens of its prompt, whose blocks it holds until then. Return None without
        `Options.pins`, and for requests of other replicas.

        Replicas take turns. A grammar that isn't compiled yet is compiled immediately.

        Raises:
            InputError: The grammar can't be followed, the request is too long for the model or the cache, or an
                unfinished request has the same id.
        """
        self._check_request(request, self._unfinished)
        self._unfinished[request.id] = request
        driver, leader = self._parts()
        index, replica = self._added, self._added % self.schedule.replicas
        self._added += 1
        if replica:
            leader.give((index, request), replica)
            return None
        return driver.add([(index, request)])

    def abort(self, request_id: str, output_tokens: int | None = None) -> None:
        """End a request before the next iteration; from any thread. Unknown ids are ignored.

        `output_tokens` is the length of a complete output, such as one that a stop text ends: it counts for the drift
        of lengths.
        """
        self._aborted[request_id] = output_tokens

    def step(self) -> list[Event]:
        """Decide and order the next iteration, if there is one, and return the new events; on the leader."""
        driver, leader = self._parts()
        if not driver.turn():
            (leader if driver.idle else driver).wait()
        leader.listen()
        return self.take()

    def update(self) -> None:
        """Process all arrivals; on the leader, at the beginning of a step by `run_phase`."""
        self._parts()[0].update()

    def run_phase(self, phase: StagePhase) -> bool:
        """Decide and order the next iteration of one phase, under a policy that has phases; on the leader.

        Return whether there was one.
        """
        return self._parts()[0].run_phase(phase)

    @property
    def computing(self) -> bool:
        """Whether an iteration is in progress, as of the latest update; on the leader."""
        return self._parts()[0].computing

    def take(self) -> list[Event]:
        """Return the new events since the last call; on the leader."""
        events = self._events[:]
        self._events.clear()  # in place, since driver and leader append to it
        for event in events:
            if isinstance(event, Result):
                self._unfinished.pop(event.id, None)
        return events

    @property
    def ledger(self) -> Ledger:
        """The leader's ledger."""
        return self._parts()[0].ledger

    def follow(self, schedule: Schedule) -> None:
        """Change to another schedule before the next iteration; on the leader.

        If it can't take over in place, `moving` returns it.
        """
        driver, leader = self._parts()
        now = driver.now()
        driver.asked = Change(now, now, now, 0.0, schedule.stages != self.schedule.stages, schedule)
        leader.broadcast(driver.asked)

    @property
    def busy(self) -> bool:
        """Whether a step has something to do, on the leader."""
        return not self.idle or self._parts()[0].asked is not None

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes so far that have taken over in place, on the leader."""
        return tuple(self._parts()[0].changes)

    @property
    def moving(self) -> Change | None:
        """The change that needs another engine (`onward`), on the leader: this engine begins no more requests."""
        return self._parts()[0].moving

    def take_spans(self) -> tuple[Span, ...]:
        """Return the spans since the last call, if spans are kept: those of each stage's first device."""
        spans, own = list(self.worker.spans or ()), self.worker.spans
        if own:
            own.clear()
        while self.transport and (message := self.transport.poll(tag=SPANS)) is not None:
            spans += message
        return tuple(spans)

    @property
    def occupancy(self) -> EngineLoad:
        """The contents of the leader's ledger."""
        ledger, pool = self._parts()[0].ledger, self._parts()[0].ledger.pool
        residents = len(ledger.waiting), len(ledger.encoding), len(ledger.decoding)
        drift = self._parts()[0].outputs.drift
        used = pool.total - pool.available
        return EngineLoad(*residents, used, pool.total, ledger.preemptions, drift.statistic if drift else 0.0)

    @property
    def idle(self) -> bool:
        """Whether all requests have ended, on the leader."""
        driver, leader = self._parts()
        return driver.idle and not leader.outstanding

    def serve(self) -> None:
        """Follow the leader's orders until it drains; on all other ranks."""
        if self._driver is None:
            serve(self.worker)
            return
        driver, follower, over = self._driver, self._replicas, False
        assert isinstance(follower, Follower)
        compiling: Compiling[tuple[int, Request]] = Compiling(self.grammars)
        while not (over and driver.idle and not compiling):
            for order in follower.orders():
                if order == END:
                    over = True
                elif isinstance(order, str):
                    self._aborted[order] = None
                    compiling.abort(order)
                elif not compiling.put(order, order[1]):
                    driver.add([order])
            for order, aborted in compiling.take():
                driver.add([order])
                if aborted:
                    self._aborted[order[1].id] = None
            if not driver.turn():
                (follower if driver.idle else driver).wait()
            follower.flush()
        driver.drain()
        follower.drain()

    def drain(self) -> list[Event]:
        """Run all requests to completion, release the other ranks, and return the last events; on the leader."""
        driver, leader = self._parts()
        leader.close()
        driver.drain()
        leader.drain()
        return self.take()

    def with_room(self, schedule: Schedule) -> Schedule:
        """Return the next engine's schedule, with enough KV blocks for each unfinished request; on the leader."""
        return grow_to_fit(schedule, self._unfinished.values())

    def surrender(self) -> None:
        """End all requests without results, because another engine continues them; release the other ranks.

        On the leader.
        """
        self._aborted.update(dict.fromkeys(self._unfinished))
        self.update()  # other replicas get the aborts before END
        self.drain()
        self._aborted.clear()  # the next engine has the same ids

    def _parts(self) -> tuple[Driver, Leader]:
        if self._driver is None or not isinstance(self._replicas, Leader):
            raise RuntimeError("only the leader of an open engine adds requests and steps")
        return self._driver, self._replicas

    def run(
        self,
        requests: Rows[Request],
        on_finish: Callable[[Result], None] | None = None,
        reschedule: Reschedule | None = None,
        order: Order = fcfs,
        hints: Callable[[Request], Hints] | None = None,
        preemption: Preemption | None = None,
    ) -> RunReport:
        """Run requests to completion; all ranks call it, with rank 0's requests.

        `on_finish` gets every result as it comes, on the leader; only the leader's report is complete.
        `reschedule` as in `open`; `order`, `hints` and `preemption` as in `Options`.

        Raises:
            InputError: Before any work, a request is too long for the model or the cache, or given twice.
        """
        share, extent = self._deal(requests)
        how = Options(stream=False, record=True, order=order, hints=hints, preemption=preemption)
        self.open(extent, how, reschedule)
        results: list[Result] = []
        if self._driver:
            self._driver.add(share)  # before any step: in a list of all, replicas are dealt equal work
        with frozen_heap():
            if not self.leads:
                self.serve()
            else:
                for event in self._run_to_completion():
                    if isinstance(event, Result):
                        results.append(event)
                        if on_finish:
                            on_finish(event)
        return RunReport.gather(self.ranks, self.worker, self._driver, results)

    def _run_to_completion(self) -> Iterator[Event]:
        """Yield all events until the last request has ended, on the leader."""
        driver, leader = self._parts()
        leader.close()
        while not (driver.idle and leader.over):
            yield from self.step()
        yield from self.drain()

    def _deal(self, requests: Rows[Request]) -> tuple[Share, Extent]:
        """Return this rank's share of rank 0's requests, and their extent."""
        shares: list[tuple[Share, Extent]] = []
        if self.ranks.rank == 0:
            self.ranks.agree(lambda: self._check_requests(requests))
            places = deal([(len(r.prompt_ids), r.max_tokens) for r in requests], self.schedule.replicas)
            for rank in range(self.ranks.size):
                place = Place(self.schedule, rank)
                share = [(i, requests[i]) for i in places[place.replica]]
                extent = Extent.of(self.schedule, [(len(r.prompt_ids), r.max_tokens) for _, r in share])
                shares.append((share if rank == place.driver else [], extent))
        else:
            self.ranks.agree(dict)
        return self.ranks.deal(shares, Request, Extent)

    def _check_requests(self, requests: Rows[Request]) -> dict[str, str]:
        seen: set[str] = set()
        for request in requests:
            self._check_request(request, seen)
            seen.add(request.id)
        return {}

    def _check_request(self, request: Request, seen: Container[str]) -> None:
        """Raise InputError for a request that can't be run, or whose id has been seen."""
        check_request(request, self.model.spec)
        self.grammars.check(request)
        if request.id in seen:
            raise InputError(f"Request '{request.id}' occurs twice: each request needs an id of its own.")
        need = blocks_needed(request, self.schedule)
        have = self._shared.pool.total if self._shared else self.schedule.kv_blocks
        if need > have:
            raise TooLong(
                f"Request '{request.id}' needs {need} KV blocks, and the schedule's cache has {have}: "
                f"shorten it, or tune with more memory."
            )
