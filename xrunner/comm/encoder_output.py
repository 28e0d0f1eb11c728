"""The encoder's output: the last encoder stage sends it to the other decoding stages.

Each of these computes from it the cross-attention's keys and values of its decoder layers.

In a pipeline, a stage stores the output when a micro-batch first decodes with it. Until then it computes other
micro-batches.
There is no deadlock: a micro-batch waits only for an earlier one on later stages, which depends on earlier ones alone.
Disaggregated (WAA), the output is stored as it arrives, like the keys and values of `kv_transfer.py`.

Outputs are stored in the order in which they were sent, up to the last one that a micro-batch needs.
Where a cancelled sequence's blocks have a new holder, the new holder's output comes later and overwrites the old one.
"""

from collections import deque
from functools import partial

import numpy as np
import torch

from xcore.arrays import Integers, Integers32
from xrunner.comm.gpu import Gpu
from xrunner.comm.kv_transfer import KVArrival
from xrunner.comm.packing import send
from xrunner.comm.place import Place
from xrunner.comm.transport import CACHE, Pending, Transport
from xrunner.models import EncoderDecoder, KVCache
from xrunner.models.weights import torch_dtype


class EncodedReceiving:
    """One rank's receives of the encoder's output from another rank."""

    def __init__(
        self, model: EncoderDecoder, cache: KVCache, place: Place, transport: Transport, gpu: Gpu | None = None
    ):
        assert place.encoded_by is not None
        self._model, self._cache, self._transport, self._gpu = model, cache, transport, gpu
        self._source, self._block_size = place.encoded_by, place.schedule.block_size
        self._coming: deque[tuple[KVArrival, torch.Tensor, Pending]] = deque()

    def expect(self, arrival: KVArrival) -> None:
        """Start receiving the output of an announced batch; `arrival.places` are the slots of its tokens."""
        shape = len(arrival.places), self._model.spec.hidden
        buffer = torch.empty(shape, dtype=torch_dtype(self._model.dtype), device=self._model.device)
        self._coming.append((arrival, buffer, self._transport.expect(buffer, self._source, CACHE)))

    def arrived(self) -> list[int]:
        """Return the numbers of newly arrived batches; their keys and values are now in the cache."""
        numbers = []
        while self._coming and self._transport.arrived(self._coming[0][2]):
            numbers.append(self._coming[0][0].number)
            self.store(1)
        return numbers

    def wait_for(self, blocks: Integers32) -> int:
        """Wait for the outputs that belong to these blocks, and return the number of outputs to `store`."""
        needed = [i for i, (arrival, _, _) in enumerate(self._coming) if self._overlaps(arrival, blocks)]
        return self._wait(needed[-1] + 1 if needed else 0)

    def store(self, count: int) -> None:
        """Compute the keys and values of the next `count` outputs, which must have arrived."""
        for _ in range(count):
            arrival, buffer, _ = self._coming.popleft()
            (slots,) = send([arrival.places], self._gpu)
            self._model.cache_encoded(buffer, slots, self._cache)

    def drain(self) -> None:
        """Receive and store all remaining outputs.

        These are outputs of cancelled sequences, for which no micro-batch has waited.
        """
        self.store(self._wait(len(self._coming)))

    def _wait(self, count: int) -> int:
        for i in range(count):
            pending = self._coming[i][2]
            self._transport.wait(partial(self._transport.arrived, pending))
        return count

    def _overlaps(self, arrival: KVArrival, blocks: Integers32) -> bool:
        return bool(np.isin(arrival.places // self._block_size, blocks).any())


def slots_in(blocks: list[int], tokens: int, block_size: int) -> Integers:
    """Return the cache slots of the first `tokens` tokens of a sequence with these blocks: [tokens]."""
    places = np.arange(tokens)
    return np.asarray(blocks, dtype=np.int64)[places // block_size] * block_size + places % block_size
