"""The engine: enforces a schedule on this rank alone, or on all ranks of a job."""

import os
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from exegpt import __version__
from exegpt.batching import MicroBatching, Sequence, deal
from exegpt.batching.admission import most_cached
from exegpt.document import fingerprint, to_dict
from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.models import Model, Shard, load_model
from exegpt.models.device import CPU, free_memory, identity
from exegpt.models.weights import torch_dtype
from exegpt.orders import fcfs
from exegpt.policies import DisaggregatedPolicy, make_ledger, make_policy
from exegpt.request import Request, Result
from exegpt.schedule import Schedule
from exegpt.served import Served
from exegpt.timeline import Span, Timeline
from xrunner.comm.gpu import Gpu
from xrunner.comm.kv_transfer import Arrival, buffer_bytes, most_in_transfer
from xrunner.comm.place import Place, devices, ranks_needed
from xrunner.comm.ranks import Agreed, Ranks
from xrunner.comm.staged import StagedTransport
from xrunner.comm.transport import Transport
from xrunner.core.adaptation import Adaptation, Change, Reschedule
from xrunner.core.disaggregated import DisaggregatedDriver
from xrunner.core.driver import Driver
from xrunner.core.replicas import Follower, Leader
from xrunner.core.requests import check_request
from xrunner.core.valid import why_not
from xrunner.rank.assembly import DeviceBatch, Running
from xrunner.rank.warm_up import Extent, warm_up
from xrunner.rank.worker import Worker

Share = list[tuple[int, Request]]
"""A replica's requests, with their places in the whole list."""
KINDS = DeviceBatch, Arrival, Result, Change
"""What ranks send each other, beside numbers and texts."""


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
    changes: tuple[Change, ...] = ()
    """Schedules that took over while it ran."""
    left: tuple[int, ...] = ()
    """Places of the requests that are to go on under another engine."""
    moving: Change | None = None
    """The schedule of that engine."""


class Engine:
    """Enforces a schedule: the policy decides, the ranks compute, the ledger books.

    `model` is what this rank has of it, and `transport` its way to the other `ranks`; alone it has all. It works on the
    model's device; `gpu` is how, where that isn't the CPU. InputError where the schedule is for another model or
    dtype, or KV caches exceed their device's memory.
    """

    def __init__(
        self,
        model: Model,
        schedule: Schedule,
        ranks: Ranks | None = None,
        transport: Transport | None = None,
        since: float | None = None,
        gpu: Gpu | None = None,
    ):
        self.model = model
        self.schedule = schedule
        self.ranks = ranks or Ranks()
        self.transport = transport
        self.place = Place(schedule, self.ranks.rank)
        self.ranks.agree(self._check)
        gpu = gpu or gpu_of(model.device)
        self._device, self._gpu = model.device, gpu
        blocks = _cache_blocks(self.place, model.spec) + (gpu is not None)  # one for rows that only fill up
        self._check_memory("A KV cache", f"of {schedule.kv_blocks} blocks on each rank", self._cache_bytes(blocks))
        cache = model.new_cache(blocks, schedule.block_size)
        self.worker = Worker(model, cache, self.place, transport, gpu)
        self._clock = self.ranks.clock()
        self._since = since
        self.began = 0.0
        """When the latest run began, by the ranks' clock."""
        self._cancelled: set[str] = set()

    @staticmethod
    def load(
        directory: str | Path,
        schedule: Schedule,
        ranks: Ranks,
        since: float | None = None,
        device: torch.device = CPU,
    ) -> "Engine":
        """This rank's engine, with its own part of the model in a directory, on its device. All ranks of a job call it
        alike. It goes on with a run that began at `since`, by the ranks' clock; None: it begins its own.

        InputError, on all of them, where they disagree, where the schedule can't be run so, or a part can't be read.
        """
        ranks.agree(lambda: _facts(directory, schedule, ranks) | {"device": device.type})
        place, gpu = Place(schedule, ranks.rank), gpu_of(device)
        transport = make_transport(ranks, place, gpu) if ranks.size > 1 else None
        shard = Shard(place.part, place.tp, transport.all_reduce) if transport else Shard(0, 1, lambda x: x)
        loaded = []

        def load() -> dict[str, str]:
            encoder_layers = place.encoder_layers if schedule.model.spec.encoder_layers else None
            ends = {"embedding": place.first, "head": place.samples and bool(place.layers)}
            held = {"layers": place.layers, "encoder_layers": encoder_layers}
            loaded.append(load_model(directory, schedule.dtype, shard=shard, device=device, **held, **ends))
            return {}

        try:
            ranks.agree(load)
            return Engine(loaded[0], schedule, ranks, transport, since, gpu)
        except Agreed:  # every rank is here
            if transport:
                transport.close()
            raise

    @property
    def leads(self) -> bool:
        """Whether this rank gets all results and the report: the first replica's driver."""
        return self.place.rank == self.place.driver and self.place.replica == 0

    def cancel(self, request_id: str) -> None:
        """End a request that this rank drives before the next iteration; from any thread. Other ids are ignored."""
        self._cancelled.add(request_id)

    def onward(self, directory: str | Path, schedule: Schedule) -> "Engine":
        """The engine that goes on with this one's run under another schedule, and cancels whom this one is told to; all
        ranks call it alike. The weights stay where stages do, and by this engine nothing can be run any more.

        InputError, on all of them, where it can't be run so; another schedule may follow.
        """
        if schedule.stages == self.schedule.stages and hasattr(self, "model"):
            engine = self._with_another_cache(schedule)
        else:
            if hasattr(self, "model"):
                self.close()
            engine = Engine.load(directory, schedule, self.ranks, self.began, self._device)
        engine._cancelled = self._cancelled
        return engine

    def _with_another_cache(self, schedule: Schedule) -> "Engine":
        """`onward` on the same stages. Who still holds this engine keeps neither its cache nor, later, its weights."""
        model = self.model
        del self.model
        self.__dict__.pop("worker", None)  # it is gone already where one schedule was refused and this is another
        try:
            return Engine(model, schedule, self.ranks, self.transport, self.began, self._gpu)
        except InputError:
            self.model = model
            raise

    def close(self) -> None:
        """Give back this rank's memory, and what the ranks have together; nothing can be run any more. All ranks call
        it, after a run that raised Agreed too.
        """
        for name in ("worker", "model"):  # of which a refused schedule may have left one
            self.__dict__.pop(name, None)
        if self.transport:
            self.transport.close()

    def run(
        self,
        requests: Rows[Request],
        on_finish: Callable[[Result], None] | None = None,
        reschedule: Reschedule | None = None,
        adjustment: float | None = None,
    ) -> RunReport:
        """Run requests to their ends; all ranks call it, with rank 0's requests. `on_finish` gets every result as it
        comes, on the leader; the other ranks' reports are of no use.

        With `reschedule`, another schedule takes over where lengths drift; where that one needs another engine, those
        who haven't begun are left to it (`changes.run_adapting`). `adjustment` as in `make_policy`.

        InputError, before any work, names a request that is too long for the model or the cache, or given twice.
        """
        share, extent = self._deal(requests)
        self._check_memory("A buffer", f"for {extent.tokens} tokens on each rank", self._buffer_bytes(extent))
        worker, running = self.worker, self._since is not None
        warm_up(self.model, worker.cache, extent, worker.compute.graphs, running, worker.gpu)
        self.worker.begin(self._clock)
        zero = self.began = self.ranks.all(self._clock())[0] if self._since is None else self._since
        clock = self._clock  # not self: an engine that nobody holds is gone at once, and its graphs and cache with it
        self.worker.now = lambda: clock() - zero
        results: list[Result] = []

        def report(result: Result) -> None:
            results.append(result)
            if on_finish:
                on_finish(result)

        if self.place.rank != self.place.driver:
            self.worker.serve()
            return self._gather(results, None)
        return self._gather(results, self._drive(share, report, reschedule, adjustment))

    def _drive(
        self, share: Share, report: Callable[[Result], None], reschedule: Reschedule | None, adjustment: float | None
    ) -> Driver:
        """Run this replica's requests. Results go to the leader, which listens to the others' meanwhile."""
        policy = make_policy(self.schedule, adjustment)
        ledger = make_ledger(self.schedule, fcfs)
        running = {}
        for index, request in share:
            prompt = np.array(request.prompt_ids, dtype=np.int64)
            sequence = Sequence(index, len(prompt), request.max_tokens, request.arrival_s)
            running[index] = Running(request, sequence, prompt, start=self.model.start)
        ledger.submit(one.sequence for one in running.values())
        stages = len(self.place.line)
        micro_batches, encode_micro_batches = self.schedule.micro_batches or stages, self.schedule.encode_micro_batches
        micro_batching = MicroBatching(micro_batches, encode_micro_batches, self.schedule.replicas)
        replicas = self._replicas(report)
        given = self.worker, ledger, running, micro_batching, self._cancelled, replicas.report, replicas.listen
        driver = (
            DisaggregatedDriver(*given, policy) if isinstance(policy, DisaggregatedPolicy) else Driver(*given, policy)
        )
        driver.adjustment = adjustment
        if isinstance(replicas, Follower):
            driver.look = replicas.look
        elif reschedule:
            adaptation = Adaptation(self.schedule, reschedule, replicas.broadcast)
            driver.look, driver.drift = adaptation.look, adaptation.drift
        driver.run()
        replicas.drain()
        return driver

    def _replicas(self, report: Callable[[Result], None]) -> Leader | Follower:
        """This driver's way to those of the other replicas."""
        size = devices(self.schedule)
        first, *others = (Place(self.schedule, size * replica).driver for replica in range(self.schedule.replicas))
        if self.leads:
            return Leader(self.transport, tuple(others), report)
        assert self.transport, "a rank alone leads"
        return Follower(self.transport, first)

    def _gather(self, results: list[Result], driver: Driver | None) -> RunReport:
        """What all ranks did, on the leader; and on those that drive, what they leave."""
        own = (self.worker.spans, driver.served, driver.left) if driver else (self.worker.spans, [], [])
        parts = self.ranks.gather(own, Place(self.schedule, 0).driver, Span, Served)
        spans: list[Span] = sorted((s for part, *_ in parts for s in part), key=lambda span: span.start_s)
        everyone = sorted((s for _, part, _ in parts for s in part), key=lambda s: s.finish_s)
        left = tuple(sorted(place for *_, part in parts for place in part))
        timeline = Timeline("measured", tuple(spans))
        changes, moving = (tuple(driver.changes), driver.moving) if driver else ((), None)
        return RunReport(tuple(results), tuple(everyone), timeline, timeline.seconds, changes, left, moving)

    def _deal(self, requests: Rows[Request]) -> tuple[Share, Extent]:
        """This rank's share of rank 0's requests, and how much any of them comes to use."""
        shares: list[tuple[Share, Extent]] = []
        if self.ranks.rank == 0:
            self.ranks.agree(lambda: self._check_requests(requests))
            places = deal([(len(r.prompt_ids), r.max_tokens) for r in requests], self.schedule.replicas)
            for rank in range(self.ranks.size):
                place = Place(self.schedule, rank)
                own = [(i, requests[i]) for i in places[place.replica]]
                extent = Extent.of(self.schedule, [(len(r.prompt_ids), r.max_tokens) for _, r in own])
                shares.append((own if rank == place.driver else [], extent))
        else:
            self.ranks.agree(dict)
        return self.ranks.deal(shares, Request, Extent)

    def _check_requests(self, requests: Rows[Request]) -> dict[str, str]:
        seen: set[str] = set()
        for request in requests:
            check_request(request, self.model.spec)
            if request.id in seen:
                raise InputError(f"Request '{request.id}' is given twice: every request needs its own id.")
            seen.add(request.id)
            need, have = blocks_needed(request, self.schedule), self.schedule.kv_blocks
            if need > have:
                raise InputError(
                    f"Request '{request.id}' needs {need} KV blocks, and the schedule's cache has {have}: "
                    f"shorten it, or tune with more memory."
                )
        return {}

    def _check(self) -> dict[str, str]:
        self.schedule.check_model(self.model.spec)
        for name, dtype in (("dtype", self.schedule.dtype), ("kv_dtype", self.schedule.kv_dtype)):
            if dtype != self.model.dtype:
                raise InputError(
                    f"The schedule has {name} {dtype} and the model was loaded in {self.model.dtype}: load both alike."
                )
        make_policy(self.schedule)  # refuses at once what can't be run
        if ranks_needed(self.schedule) != self.ranks.size:
            raise InputError(_how_to_start(self.schedule, self.ranks.size))
        return {}

    def _cache_bytes(self, blocks: int) -> int:
        tokens = blocks * self.schedule.block_size
        return tokens * self.model.cached_layers * self.model.share.kv_bytes(1, self.model.dtype)

    def _buffer_bytes(self, extent: Extent) -> int:
        """Bytes of what this rank gets from others, and sends at once at most."""
        spec, place, block_size = self.model.spec, self.place, self.schedule.block_size
        states = extent.tokens * spec.hidden * torch_dtype(self.model.dtype).itemsize
        batches = 1 if place.line[0].phase == "both" else most_in_transfer(len(place.encoder.line))
        if spec.encoder_layers:
            sends_or_receives = place.encoded_by is not None or bool(place.encodes_for)
            return ((place.before is not None) + batches * sends_or_receives) * states
        a_batch = extent.tokens // block_size + (self.schedule.encode_batch or 0)
        transferred = 0 if place.line[0].phase == "both" else min(batches * a_batch, self.schedule.kv_blocks)
        return (place.before is not None) * states + buffer_bytes(place, spec, transferred)

    def _check_memory(self, what: str, how: str, need: int) -> None:
        """InputError, on all ranks, where what they are about to take on a device is more than it has left."""
        mine = self.ranks.host, identity(self.model.device)
        everyone = self.ranks.all((mine, need))

        def check() -> dict[str, str]:
            here, free = sum(bytes for device, bytes in everyone if device == mine), free_memory(self.model.device)
            if here > free:
                raise InputError(
                    f"{what} {how} needs {here / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are available: use a "
                    "schedule with fewer blocks."
                )
            return {}

        self.ranks.agree(check)


def blocks_needed(request: Request, schedule: Schedule) -> int:
    """KV blocks for all tokens that a request may ever cache."""
    start = bool(schedule.model.spec.encoder_layers)
    return -(-most_cached(len(request.prompt_ids), request.max_tokens, start) // schedule.block_size)


def _facts(directory: str | Path, schedule: Schedule, ranks: Ranks) -> dict[str, str]:
    """What all ranks must agree on; InputError for a schedule that can't be run by so many ranks with this model."""
    spec = ModelSpec.from_directory(directory)
    reason = why_not(schedule, spec)
    if reason:
        raise InputError(reason)
    if ranks_needed(schedule) != ranks.size:
        raise InputError(_how_to_start(schedule, ranks.size))
    files = [(path.name, path.stat().st_size) for path in sorted(Path(directory).glob("*.safetensors"))]
    return {
        "exegpt": __version__,
        "model": f"{spec.name} ({fingerprint([spec.fingerprint, files])})",
        "schedule": fingerprint(to_dict(schedule)),
    }


def gpu_of(device: torch.device) -> Gpu | None:
    """How a device is worked on; None for the CPU."""
    return Gpu(device) if device.type == "cuda" else None


def make_transport(ranks: Ranks, place: Place, gpu: Gpu | None) -> Transport:
    """A rank's way to the others, where all call it: from GPU to GPU if each has its own, else through host memory."""
    if gpu is None:
        return Transport(ranks, place.group, KINDS)
    import torch.distributed as dist

    direct = dist.is_available() and dist.is_nccl_available() and os.environ.get("EXEGPT_NCCL") != "0"
    everyone = ranks.all((ranks.host, identity(gpu.device), direct))
    if all(direct for _, _, direct in everyone) and len(set(everyone)) == ranks.size:
        from xrunner.comm.direct import DirectTransport

        return DirectTransport(ranks, place.schedule, place.schedule.model.spec, KINDS, gpu)
    return StagedTransport(ranks, place.group, KINDS, gpu)


def _how_to_start(schedule: Schedule, started: int) -> str:
    need = ranks_needed(schedule)
    what = "one process was" if started == 1 else f"{started} ranks were"
    return (
        f"This schedule is for {need} devices ({schedule.replicas} x {devices(schedule)}), and {what} started: start "
        f"mpirun -n {need} exegpt run."
    )


def _cache_blocks(place: Place, spec: ModelSpec) -> int:
    """KV blocks of a rank. Where it only encodes, a batch has them for itself, and leaves them when it is encoded."""
    schedule = place.schedule
    if place.line[0].phase != "encode":
        return schedule.kv_blocks
    longest = -(-spec.context // schedule.block_size)
    return min(schedule.kv_blocks, (schedule.encode_batch or 0) * longest)
