"""KV transfer of a disaggregated schedule: a prefilled batch's keys and values go from encoding to decoding ranks.

The two sides may split layers into other stages and heads into other shards.
Every pair of ranks that have heads of layers in common is a route.
The encoding side gathers a batch's blocks into one contiguous buffer per route, sent while the next batch is prefilled.
The decoding side scatters the buffer into the blocks that the batch's sequences have held there since their admission.
That is safe at any moment after the order that announces the batch: all work ordered before it is complete by then,
including the work of the blocks' last holders.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass

import torch

from exegpt.kernels.kv_blocks import gather_blocks, scatter_blocks
from xcore.arrays import Integers
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule, devices
from xrunner.comm.gpu import Gpu
from xrunner.comm.packing import send
from xrunner.comm.place import Place
from xrunner.comm.transport import CACHE, Pending, Transport
from xrunner.models import KVCache


@dataclass(frozen=True)
class Route:
    """Heads of layers that one encoding rank sends to one decoding rank for every batch."""

    source: int
    target: int
    layers: range
    heads: range

    def parts(self, cache: KVCache, place: Place, spec: ModelSpec) -> Iterator[torch.Tensor]:
        """Yield the route's view of every tensor of a rank's cache, each [blocks, heads, elements of a head]."""
        first = held_heads(place, spec).start
        for layer in self.layers:
            for tensors in (cache.keys, cache.values):
                tensor = tensors[layer - place.layers.start]
                yield tensor.flatten(2)[:, self.heads.start - first : self.heads.stop - first]


@dataclass(frozen=True)
class KVArrival:
    """The announcement of a batch's keys and values, or of the encoder's output from which they are computed."""

    number: int
    places: Integers
    """Their places in the cache, [n]: blocks of the decoding side, or the slots of its tokens."""


def held_heads(place: Place, spec: ModelSpec) -> range:
    """Return the KV heads of a rank's shard, as `Shard.cut` splits them.

    With fewer heads than shards, several shards have the same head.
    """
    count = max(1, spec.kv_heads // place.tp)
    first = place.part * spec.kv_heads // place.tp // count * count
    return range(first, first + count)


def routes(schedule: Schedule, replica: int, spec: ModelSpec) -> tuple[Route, ...]:
    """Return every route of a replica; each decoding rank gets every head of its layers from exactly one rank."""
    size = devices(schedule)
    places = [Place(schedule, rank) for rank in range(replica * size, (replica + 1) * size)]
    stages = [list(group) for _, group in itertools.groupby(places, lambda place: place.stage)]
    encoding = [ranks for ranks in stages if ranks[0].line[0].phase == "encode"]
    decoding = [place for ranks in stages if ranks[0].line[0].phase == "decode" for place in ranks]
    return tuple(route for target in decoding for sources in encoding for route in _between(sources, target, spec))


def _between(sources: list[Place], target: Place, spec: ModelSpec) -> Iterator[Route]:
    """Yield the routes from the ranks of one encoding stage to one decoding rank."""
    source_layers, target_layers = sources[0].layers, target.layers
    first, end = max(source_layers.start, target_layers.start), min(source_layers.stop, target_layers.stop)
    layers = range(first, end)
    if not layers:
        return
    heads = {head: _source(head, target, sources, spec) for head in held_heads(target, spec)}
    for source in dict.fromkeys(heads.values()):
        sent = [head for head, sender in heads.items() if sender == source]
        yield Route(source, target.rank, layers, range(sent[0], sent[-1] + 1))


def _source(head: int, target: Place, sources: list[Place], spec: ModelSpec) -> int:
    """Return the rank that sends a head; targets are spread over the ranks that have a copy."""
    holders = [source for source in sources if head in held_heads(source, spec)]
    return holders[target.part % len(holders)].rank


class _Side:
    """A rank's routes, each with its views of the cache's tensors."""

    def __init__(self, cache: KVCache, place: Place, spec: ModelSpec, transport: Transport, gpu: Gpu | None = None):
        self._transport, self._gpu = transport, gpu
        own_routes = [r for r in routes(place.schedule, place.replica, spec) if place.rank in (r.source, r.target)]
        self._routes = [(route, list(route.parts(cache, place, spec))) for route in own_routes]
        if gpu:
            self._warm_up(torch.zeros(1, dtype=torch.int64, device=gpu.device))

    def _warm_up(self, index: torch.Tensor) -> None:
        """Compile the kernels that move blocks, by moving the blocks of `index` in a cache without sequences."""
        for _, parts in self._routes:
            buffer = _buffer(parts, index)
            gather_blocks(parts, index, buffer)
            scatter_blocks(buffer, parts, index)


def _buffer(parts: list[torch.Tensor], blocks: Sized) -> torch.Tensor:
    """Return a buffer for n blocks: [tensors, n, heads · elements of a head]."""
    first = parts[0]
    return torch.empty(len(parts), len(blocks), first[0].numel(), dtype=first.dtype, device=first.device)


class KVSending(_Side):
    """An encoding rank's side of its routes."""

    def send(self, blocks: Integers) -> None:
        """Send these blocks, [n]; they may be overwritten as soon as this returns."""
        (index,) = send([blocks], self._gpu)
        for route, parts in self._routes:
            buffer = _buffer(parts, index)
            gather_blocks(parts, index, buffer)
            self._transport.send(buffer, route.target, CACHE)


class KVReceiving(_Side):
    """A decoding rank's side of its routes."""

    def __init__(self, cache: KVCache, place: Place, spec: ModelSpec, transport: Transport, gpu: Gpu | None = None):
        super().__init__(cache, place, spec, transport, gpu)
        self._coming: deque[tuple[KVArrival, list[tuple[torch.Tensor, Pending]]]] = deque()

    def expect(self, arrival: KVArrival) -> None:
        """Start receiving an announced batch."""
        buffers = [_buffer(parts, arrival.places) for _, parts in self._routes]
        pending = [
            self._transport.expect(buffer, route.source, CACHE)
            for (route, _), buffer in zip(self._routes, buffers, strict=True)
        ]
        self._coming.append((arrival, list(zip(buffers, pending, strict=True))))

    def arrived(self) -> list[int]:
        """Return the numbers of newly arrived batches, which are now in the cache.

        They are stored in the order of announcement, so that a block ends up with its last holder's keys and values.
        """
        numbers = []
        while self._coming and all(self._transport.arrived(pending) for _, pending in self._coming[0][1]):
            arrival, buffers = self._coming.popleft()
            (index,) = send([arrival.places], self._gpu)
            for (_, parts), (buffer, _) in zip(self._routes, buffers, strict=True):
                scatter_blocks(buffer, parts, index)
            numbers.append(arrival.number)
        return numbers


def buffer_bytes(place: Place, spec: ModelSpec, blocks: int) -> int:
    """Return the bytes of the buffers in which a rank sends or receives `blocks` blocks."""
    schedule = place.schedule
    if not blocks:
        return 0
    own_routes = [r for r in routes(schedule, place.replica, spec) if place.rank in (r.source, r.target)]
    width = schedule.block_size * spec.head_kv_bytes(schedule.kv_dtype)
    return sum(len(r.layers) * len(r.heads) for r in own_routes) * width * blocks
