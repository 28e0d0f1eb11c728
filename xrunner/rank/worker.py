"""Worker: runs one rank's layers on one device batch after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from xcore.specs.timeline import Span
from xrunner.comm.encoder_output import EncodedReceiving
from xrunner.comm.gpu import Gpu
from xrunner.comm.kv_transfer import KVArrival, KVReceiving, KVSending
from xrunner.comm.place import Place
from xrunner.comm.transport import CACHE, NOTICE, SPANS, STATES, TOKENS, Transport, wait
from xrunner.models import EncoderDecoder, KVCache, Model
from xrunner.models.weights import torch_dtype
from xrunner.rank.assembly import DeviceBatch
from xrunner.rank.compute import Compute, Launched
from xrunner.rank.swap_space import SwapSpace

T = TypeVar("T")
END = "end"
"""The order that ends a worker's run."""
_SPANS_AT_ONCE = 16
"""About 3 KB: MPI sends that much at once, even if no rank receives it any more."""
FREE = "free"
"""The notice that the first encoding stage is free for the next batch."""


@dataclass(frozen=True)
class LaunchedBatch:
    """A batch on this rank's device."""

    batch: DeviceBatch
    start: float
    launched: Launched


class Worker:
    """Receives states from the stage before, or embeds tokens; computes its layers; sends states on, or samples tokens.

    `transport` is None for a single rank.
    """

    def __init__(self, model: Model, cache: KVCache, place: Place, transport: Transport | None, gpu: Gpu | None = None):
        self.model = model
        self.cache = cache
        self.place = place
        self.transport = transport
        self.now: Callable[[], float] = lambda: 0.0
        """Seconds since the run began, the same on every rank."""
        self._ended = 0.0
        """When the last batch was complete."""
        self.spans: list[Span] | None = []
        """The spans of what it has computed; None: they aren't kept."""
        self._report_to: int | None = None
        """The rank that collects the spans; None: they are kept here."""
        self.between: Callable[[], object] = lambda: None
        """Called between the layers of an iteration, and while this rank waits."""
        self.gpu = gpu
        self.swap_space = SwapSpace(cache, gpu)
        self.compute = self._compute()
        self.sending, self.receiving = self._kv_transfer()
        self.encoded = self._encoded_in_pipeline()

    def begin(self, now: Callable[[], float], record: bool = True, report_to: int | None = None) -> None:
        """Start a run. Its spans are kept if `record`, or sent to the rank `report_to`."""
        self.now, self.spans, self._ended = now, [] if record else None, 0.0
        self._report_to, self.swap_space = report_to, SwapSpace(self.cache, self.gpu)

    def wait(self, poll: Callable[[], T | None]) -> T:
        """Call `poll` until it returns neither None nor False, and return that."""
        return self.transport.wait(poll, self.between) if self.transport else wait(poll)

    def run(self, batch: DeviceBatch, start: float | None = None) -> torch.Tensor | None:
        """Compute a batch, and return what `complete` returns."""
        return self.complete(self.launch(batch, start))

    def launch(self, batch: DeviceBatch, start: float | None = None) -> LaunchedBatch:
        """Begin to compute a batch; its span begins at `start`, or when its states have arrived."""
        place = self.place
        self.swap_space.execute(batch.swaps)
        x = None if place.before is None else self._receive(batch, place.before)
        outputs = self.encoded.wait_for(batch.decoding_blocks) if self.encoded else 0
        start = self.now() if start is None or outputs else start
        if self.encoded:
            self.encoded.store(outputs)
        return LaunchedBatch(batch, start, self.compute.launch(batch, x, self._between_layers))

    def is_complete(self, running: LaunchedBatch) -> bool:
        """Return whether a batch is computed."""
        moment = running.launched.moment
        return moment is None or moment.query()

    def complete(self, running: LaunchedBatch) -> torch.Tensor | None:
        """Wait until a batch is computed, and pass its states on.

        On the sampling rank, return int64 [batch.result_size]: the time of the batch's end, as the bits of a float64,
        then the result of `Model.sample`.
        """
        batch, place = running.batch, self.place
        self.compute.complete(running.launched, self.between)
        end = self.now()
        self._pass_on(batch, running.launched.states)
        if self.spans is not None:
            start = max(running.start, self._ended)  # it may have been launched while another was computed
            facts = batch.phase, batch.micro_batch, start, end, batch.sequences, batch.computed
            self.spans.append(Span(place.rank, place.stage, *facts))
            self._report(self.spans)
        self._ended, tokens = end, running.launched.tokens
        if tokens is None:
            return None
        return torch.cat([torch.tensor([end], dtype=torch.float64).view(torch.int64), tokens])

    def _report(self, spans: list[Span]) -> None:
        """Send spans to the rank that collects them, as many at a time as MPI sends without a receiver."""
        if self._report_to is not None and len(spans) >= _SPANS_AT_ONCE:
            assert self.transport
            self.transport.post(spans, self._report_to, tag=SPANS)
            spans.clear()

    def _pass_on(self, batch: DeviceBatch, x: torch.Tensor) -> None:
        """Send states [rows, hidden] to the next stage, and the encoder's output to the ranks that need it."""
        for rank in self.place.after:
            assert self.transport
            self.transport.send(x, rank, STATES)
        if batch.prompts and self.encoded:
            self.encoded.expect(KVArrival(0, batch.slots[: batch.prompts]))
        for rank in self.place.encodes_for if batch.prompts else ():
            assert self.transport
            self.transport.send(x[: batch.prompts], rank, CACHE)

    def follow(self) -> None:
        """Begin to follow the driver's orders (`serve`)."""
        self.between = self._report_arrived

    def next_order(self) -> DeviceBatch | KVArrival | str | None:
        """Return the driver's next order; None if none has arrived."""
        self.between()
        assert self.transport, "a single rank has no driver to serve"
        order: DeviceBatch | KVArrival | str | None = self.transport.poll(self.place.driver)
        return order

    def obey(self, order: DeviceBatch | KVArrival | str) -> bool:
        """Execute an order of the driver. Return whether more orders will come."""
        if isinstance(order, str):
            self.between = lambda: None
            self.drain()
            return False
        if isinstance(order, KVArrival):
            assert self.receiving
            self.receiving.expect(order)
            return True
        transport, place, result = self.transport, self.place, self.run(order)
        assert transport
        encodes = place.line[0].phase == "encode"
        if result is not None and (order.result_size > 1 or encodes):
            transport.send(result, place.driver, TOKENS)
        if encodes and place.first and place.part == 0:
            transport.post(FREE, place.driver, tag=NOTICE)  # ordered while this batch is in transfer
        if self.sending and order.transferred is not None:
            self.sending.send(order.transferred)
        return True

    def drain(self) -> None:
        """Receive what is still in transfer to this rank, at a run's end."""
        if self.encoded:
            self.encoded.drain()

    def _between_layers(self) -> None:
        with torch.inference_mode(False):  # a received tensor may be copied while no layer is computed
            if self.transport:
                self.transport.progress()
            self.between()

    def _report_arrived(self) -> None:
        """Notify the driver of arrived keys and values."""
        if self.receiving and self.transport:
            for number in self.receiving.arrived():
                self.transport.post(number, self.place.driver, tag=NOTICE)

    def _compute(self) -> Compute:
        """Return this rank's layers on its device, with graphs if its all-reduces can be captured."""
        place, transport = self.place, self.transport
        graphs = place.line[0].phase != "encode" and (place.tp == 1 or bool(transport and transport.capturable))
        arguments = self.model, self.cache, place.samples, self.gpu, graphs, place.before is not None
        if transport is None:
            return Compute(*arguments)
        return Compute(*arguments, wait=lambda moment, between: transport.wait(moment.query, between))

    def _kv_transfer(self) -> tuple[KVSending | None, KVReceiving | EncodedReceiving | None]:
        """Return this rank's side of the KV transfer, if the schedule is disaggregated."""
        phase = self.place.line[0].phase
        if phase == "both":
            return None, None
        assert self.transport
        if isinstance(self.model, EncoderDecoder):
            return None, self._receives_encoded() if phase == "decode" else None
        arguments = self.cache, self.place, self.model.spec, self.transport, self.gpu
        return (KVSending(*arguments), None) if phase == "encode" else (None, KVReceiving(*arguments))

    def _encoded_in_pipeline(self) -> EncodedReceiving | None:
        """Return the receives of the encoder's output from a later stage of the same pipeline; None if not needed."""
        needed = self.place.line[0].phase == "both" and self.place.encoded_by is not None
        return self._receives_encoded() if needed else None

    def _receives_encoded(self) -> EncodedReceiving:
        assert self.transport and isinstance(self.model, EncoderDecoder)
        return EncodedReceiving(self.model, self.cache, self.place, self.transport, self.gpu)

    def _receive(self, batch: DeviceBatch, before: int) -> torch.Tensor:
        """Return the states of a batch's rows from the stage before: [rows, hidden].

        The tensor is new each time: layers work in place, and it may still be in transfer to the next stage when the
        next batch's states arrive.
        """
        assert self.transport
        kind = torch_dtype(self.model.dtype)
        x = torch.empty(len(batch.tokens), self.model.spec.hidden, dtype=kind, device=self.model.device)
        return self.transport.receive(x, before, STATES, self.between)


def serve(*workers: Worker) -> None:
    """Run the orders of these workers' drivers on this rank, one at a time, until each has sent END."""
    serving = list(workers)
    for worker in serving:
        worker.follow()

    def next_order() -> tuple[Worker, DeviceBatch | KVArrival | str] | None:
        for worker in serving:
            order = worker.next_order()
            if order is not None:
                return worker, order
        return None

    def progress() -> None:
        for worker in serving:
            assert worker.transport
            worker.transport.progress()

    while serving:
        worker, order = wait(next_order, progress)
        if not worker.obey(order):
            serving.remove(worker)
