"""The encoder's output, from the stage that ends the encoder to the other stages that decode: each makes the
cross-attention's keys and values of its own decoder layers of it.

In a pipeline a stage takes it when a piece decodes with it for the first time; until then it works on others. Nobody
waits in a circle: what a piece waits for is an earlier piece on the stages behind, which hangs on earlier pieces alone.
Where sides are apart (WAA), it is taken as it comes, like the keys and values of `kv_transfer.py`.

Outputs are taken in the order in which they were sent, and a piece takes all up to the last one that it needs: where a
cancelled sequence's blocks have another holder, that one's came later and overwrites what was left there.
"""

from collections import deque
from typing import Any

import numpy as np
import torch

from exegpt.models import EncoderDecoder, KVCache
from exegpt.models.weights import torch_dtype
from xrunner.comm.gpu import Gpu
from xrunner.comm.kv_transfer import Arrival
from xrunner.comm.packing import send
from xrunner.comm.place import Place
from xrunner.comm.transport import CACHE, Transport


class EncodedReceiving:
    """The side of a rank that takes the encoder's output from another."""

    def __init__(
        self, model: EncoderDecoder, cache: KVCache, place: Place, transport: Transport, gpu: Gpu | None = None
    ):
        assert place.encoded_by is not None
        self._model, self._cache, self._transport, self._gpu = model, cache, transport, gpu
        self._source, self._block_size = place.encoded_by, place.schedule.block_size
        self._coming: deque[tuple[Arrival, torch.Tensor, Any]] = deque()

    def expect(self, arrival: Arrival) -> None:
        """Make room for the output of a batch whose tokens have these slots."""
        shape = len(arrival.places), self._model.spec.hidden
        buffer = torch.empty(shape, dtype=torch_dtype(self._model.dtype), device=self._model.device)
        self._coming.append((arrival, buffer, self._transport.expect(buffer, self._source, CACHE)))

    def arrived(self) -> list[int]:
        """The numbers of the batches that have come since, whose keys and values now are in the cache."""
        numbers = []
        while self._coming and self._transport.arrived(self._coming[0][2]):
            numbers.append(self._coming[0][0].number)
            self.take(1)
        return numbers

    def wait_for(self, blocks: np.ndarray) -> int:
        """Wait for what lies in these blocks; returns how many outputs are to be taken for it."""
        needed = [i for i, (arrival, _, _) in enumerate(self._coming) if self._in(arrival, blocks)]
        return self._wait(needed[-1] + 1 if needed else 0)

    def take(self, count: int) -> None:
        """Make the keys and values of so many outputs, which are there."""
        for _ in range(count):
            arrival, buffer, _ = self._coming.popleft()
            (slots,) = send([arrival.places], self._gpu)
            self._model.take_over(buffer, slots, self._cache)

    def finish(self) -> None:
        """Take what nobody has decoded with: its sequences were cancelled."""
        self.take(self._wait(len(self._coming)))

    def _wait(self, count: int) -> int:
        for i in range(count):
            pending = self._coming[i][2]
            self._transport.wait(lambda pending=pending: self._transport.arrived(pending))
        return count

    def _in(self, arrival: Arrival, blocks: np.ndarray) -> bool:
        return bool(np.isin(arrival.places // self._block_size, blocks).any())


def slots_in(blocks: list[int], tokens: int, block_size: int) -> np.ndarray:
    """The places in the cache of the first so many tokens of a sequence with these blocks: int64 [tokens]."""
    places = np.arange(tokens)
    return np.asarray(blocks, dtype=np.int64)[places // block_size] * block_size + places % block_size
