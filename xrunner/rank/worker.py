"""Worker: one rank's layers at work on one piece after the other."""

from collections.abc import Callable

import numpy as np
import torch

from exegpt.models import EncoderDecoder, KVCache, Model
from exegpt.models.weights import torch_dtype
from exegpt.timeline import Span
from xrunner.comm.encoder_output import EncodedReceiving
from xrunner.comm.gpu import Gpu
from xrunner.comm.kv_transfer import Arrival, Receiving, Sending
from xrunner.comm.place import Place
from xrunner.comm.transport import CACHE, NOTICE, STATES, TOKENS, Transport
from xrunner.rank.assembly import Work
from xrunner.rank.compute import Compute

END = "end"
"""The order after which a worker has nothing more to do."""
FREE = "free"
"""The notice that the first encoding stage can take the next batch."""


class Worker:
    """Takes states from the stage before, or embeds tokens; computes its layers; hands states on, or samples tokens.

    `transport` is None where the rank is alone.
    """

    def __init__(self, model: Model, cache: KVCache, place: Place, transport: Transport | None, gpu: Gpu | None = None):
        self.model = model
        self.cache = cache
        self.place = place
        self.transport = transport
        self.now: Callable[[], float] = lambda: 0.0
        """Seconds since the run began, on every rank alike."""
        self.spans: list[Span] = []
        self.gpu = gpu
        self.compute = self._compute()
        self.sending, self.receiving = self._handover()
        self.returning = self._returning()

    def begin(self, now: Callable[[], float]) -> None:
        """Be ready for a run."""
        self.now, self.spans = now, []

    def run(self, work: Work, start: float | None = None) -> torch.Tensor | None:
        """Compute a piece, from `start` on (None: from when its states are there). Where this rank samples: the moment
        it was done, as the bits of a float, and its tokens, int64 [1 + tokens].
        """
        place = self.place
        x = None if place.before is None else self._take(work, place.before)
        returned = self.returning.wait_for(work.decoding_in) if self.returning else 0
        start = self.now() if start is None or returned else start
        if self.returning:
            self.returning.take(returned)
        x, out = self.compute(work, x)
        end = self.now()
        self._pass_on(work, x)
        span = Span(place.rank, place.stage, work.phase, work.micro_batch, start, end, work.sequences, work.computed)
        self.spans.append(span)
        return None if out is None else torch.cat([torch.tensor([end], dtype=torch.float64).view(torch.int64), out])

    def _pass_on(self, work: Work, x: torch.Tensor) -> None:
        """Send a piece's states [rows, hidden] to the stage after, and what is the encoder's output to who needs it."""
        for rank in self.place.after:
            assert self.transport
            self.transport.send(x, rank, STATES)
        if work.prompts and self.returning:
            self.returning.expect(Arrival(0, work.slots[: work.prompts]))
        for rank in self.place.encodes_for if work.prompts else ():
            assert self.transport
            self.transport.send(x[: work.prompts], rank, CACHE)

    def serve(self) -> None:
        """Do what the driver orders, until it says that this is the end."""
        transport, place = self.transport, self.place
        assert transport, "a rank that is alone orders itself"
        transport.meanwhile = self._tell_arrived if self.receiving else None
        encodes = place.line[0].phase == "encode"
        while (order := transport.wait(self._next)) != END:
            if isinstance(order, Arrival):
                assert self.receiving
                self.receiving.expect(order)
                continue
            made = self.run(order)
            if made is not None and (order.gives or encodes):
                transport.send(made, place.driver, TOKENS)
            if encodes and place.first and place.part == 0:
                transport.post(FREE, place.driver, tag=NOTICE)  # the next order comes while this batch is handed over
            if self.sending and order.handed is not None:
                self.sending.send(order.handed)
        transport.meanwhile = None
        self.finish()

    def finish(self) -> None:
        """Take what is still on its way here, at a run's end."""
        if self.returning:
            self.returning.finish()

    def _next(self) -> Work | Arrival | str | None:
        self._tell_arrived()
        assert self.transport
        order: Work | Arrival | str | None = self.transport.poll(self.place.driver)
        return order

    def _tell_arrived(self) -> None:
        """Let the driver know of the keys and values that have come."""
        if self.receiving and self.transport:
            for number in self.receiving.arrived():
                self.transport.post(number, self.place.driver, tag=NOTICE)

    def _compute(self) -> Compute:
        """This rank's layers on its device. On a GPU its graphs need sums that a graph can hold."""
        place, transport = self.place, self.transport
        graphs = place.line[0].phase != "encode" and (place.tp == 1 or bool(transport and transport.capturable))
        given = self.model, self.cache, place.samples, self.gpu, graphs, place.before is not None
        if transport is None:
            return Compute(*given)
        return Compute(*given, wait=lambda moment: transport.wait(moment.query))

    def _handover(self) -> tuple[Sending | None, Receiving | EncodedReceiving | None]:
        """This rank's side of the handover, where encoding and decoding have stages of their own."""
        phase = self.place.line[0].phase
        if phase == "both":
            return None, None
        assert self.transport
        if isinstance(self.model, EncoderDecoder):
            return None, self._encoded() if phase == "decode" else None
        given = self.cache, self.place, self.model.spec, self.transport, self.gpu
        return (Sending(*given), None) if phase == "encode" else (None, Receiving(*given))

    def _returning(self) -> EncodedReceiving | None:
        """How the encoder's output comes back to this rank, in a pipeline."""
        returns = self.place.line[0].phase == "both" and self.place.encoded_by is not None
        return self._encoded() if returns else None

    def _encoded(self) -> EncodedReceiving:
        assert self.transport and isinstance(self.model, EncoderDecoder)
        return EncodedReceiving(self.model, self.cache, self.place, self.transport, self.gpu)

    def _take(self, work: Work, before: int) -> torch.Tensor:
        """The states of a piece's rows, from the stage before: [rows, hidden]. A tensor of their own, in which layers
        work in place: it may still be on its way to the stage after when the next piece's states come.
        """
        assert self.transport
        kind = torch_dtype(self.model.dtype)
        x = torch.empty(len(work.tokens), self.model.spec.hidden, dtype=kind, device=self.model.device)
        return self.transport.receive(x, before, STATES)


def read_made(made: torch.Tensor) -> tuple[float, list[int]]:
    """When a piece was done, and its tokens: what `Worker.run` gave."""
    array = made.numpy()
    return float(array[:1].view(np.float64)[0]), array[1:].tolist()
