"""The encoder's output, sent from the last encoder stage to the other decoding stages: each computes from it the
cross-attention's keys and values of its own decoder layers.

In a pipeline a stage stores it when a micro-batch first decodes with it, and works on others until then. No deadlock: a
micro-batch waits only for an earlier one on later stages, which depends on earlier ones alone. Disaggregated (WAA), it
is stored as it arrives, like the keys and values of `kv_transfer.py`.

Outputs are stored in the order in which they were sent, up to the last one that a micro-batch needs: where a cancelled
sequence's blocks have a new holder, the new one's output came later and overwrites the cancelled one's.
"""

from collections import deque
from typing import Any

import numpy as np
import torch

from xrunner.comm.gpu import Gpu
from xrunner.comm.kv_transfer import Arrival
from xrunner.comm.packing import send
from xrunner.comm.place import Place
from xrunner.comm.transport import CACHE, Transport
from xrunner.models import EncoderDecoder, KVCache
from xrunner.models.weights import torch_dtype


class EncodedReceiving:
    """A rank's receives of the encoder's output from another rank."""

    def __init__(
        self, model: EncoderDecoder, cache: KVCache, place: Place, transport: Transport, gpu: Gpu | None = None
    ):
        assert place.encoded_by is not None
        self._model, self._cache, self._transport, self._gpu = model, cache, transport, gpu
        self._source, self._block_size = place.encoded_by, place.schedule.block_size
        self._coming: deque[tuple[Arrival, torch.Tensor, Any]] = deque()

    def expect(self, arrival: Arrival) -> None:
        """Start receiving the output of a batch whose tokens have these slots."""
        shape = len(arrival.places), self._model.spec.hidden
        buffer = torch.empty(shape, dtype=torch_dtype(self._model.dtype), device=self._model.device)
        self._coming.append((arrival, buffer, self._transport.expect(buffer, self._source, CACHE)))

    def arrived(self) -> list[int]:
        """The numbers of newly arrived batches, whose keys and values are now in the cache."""
        numbers = []
        while self._coming and self._transport.arrived(self._coming[0][2]):
            numbers.append(self._coming[0][0].number)
            self.store(1)
        return numbers

    def wait_for(self, blocks: np.ndarray) -> int:
        """Wait for the outputs that belong to these blocks; returns how many to `store` for them."""
        needed = [i for i, (arrival, _, _) in enumerate(self._coming) if self._overlaps(arrival, blocks)]
        return self._wait(needed[-1] + 1 if needed else 0)

    def store(self, count: int) -> None:
        """Compute the keys and values of the next `count` outputs, which have arrived."""
        for _ in range(count):
            arrival, buffer, _ = self._coming.popleft()
            (slots,) = send([arrival.places], self._gpu)
            self._model.cache_encoded(buffer, slots, self._cache)

    def drain(self) -> None:
        """Store the outputs of cancelled sequences too, which no micro-batch has waited for."""
        self.store(self._wait(len(self._coming)))

    def _wait(self, count: int) -> int:
        for i in range(count):
            pending = self._coming[i][2]
            self._transport.wait(lambda pending=pending: self._transport.arrived(pending))
        return count

    def _overlaps(self, arrival: Arrival, blocks: np.ndarray) -> bool:
        return bool(np.isin(arrival.places // self._block_size, blocks).any())


def slots_in(blocks: list[int], tokens: int, block_size: int) -> np.ndarray:
    """The slots in the cache of the first `tokens` tokens of a sequence with these blocks: int64 [tokens]."""
    places = np.arange(tokens)
    return np.asarray(blocks, dtype=np.int64)[places // block_size] * block_size + places % block_size
