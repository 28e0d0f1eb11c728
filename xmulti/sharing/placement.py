"""MuxServe's placement of models on shared devices: enumeration of meshes and greedy assignment.

Meshes are parts of nodes, of 2^k devices each. For every way to cut the nodes into meshes, models are assigned one
after the other, in order of rate × size. Each goes to the mesh where the throughput within the rates rises most. The
throughput of a unit is that of continuous batching in which all models wait for all prefills:

    P_m = B_m / (S_m · T_dec(B_m) + Σ_j T_pre(B_j)),    summed up to the rates.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from xcore.arrays import Array
from xmulti.sharing.iteration_cost import IterationCost

DECODE_SHARES = tuple(part / 10 for part in range(3, 10))
"""Possible shares of the multiprocessors for decoding; prefills have all."""
MOST_SHARES = 1.2
"""Maximum sum of the decoding shares of a mesh."""
MOST_SEQS = 256
_BATCHES = tuple(sorted({round(2 ** (k / 2)) for k in range(17)}))


@dataclass(frozen=True, eq=False)
class Popular:
    """A model to be placed: its rate, its mean lengths, and its memory and work on a mesh."""

    name: str
    rate_seq_s: float
    input: float
    output: float
    work: float
    """Rate times size: the model with the most is placed first."""
    cost: Callable[[int], IterationCost | None]
    """Iteration costs on a number of devices; None if the model can't run on them."""
    weight_bytes: float
    kv_token_bytes: float
    longest: int
    """Tokens of the longest sequence, for which there must be room."""

    @property
    def kv_bytes(self) -> float:
        """Bytes of one sequence, on average over its life."""
        return (self.input + self.output / 2) * self.kv_token_bytes

    @property
    def least_bytes(self) -> float:
        """Bytes of the model's longest sequence."""
        return self.longest * self.kv_token_bytes


@dataclass(frozen=True, eq=False)
class Occupant:
    """A model on a mesh, with its decoding share."""

    popular: Popular
    devices: int
    decode_share: float
    cost: IterationCost

    @cached_property
    def seconds(self) -> tuple[Array, Array]:
        """Seconds of a batch's prefill, and of all its decoding, for each of `_BATCHES`."""
        popular = self.popular
        context = np.array([popular.input + popular.output / 2])
        length = max(1, round(popular.input))
        prefill = [self.cost.prefill_seconds([length] * batch, 1.0) for batch in _BATCHES]
        decode = [float(self.cost.decode_seconds(batch, context, self.decode_share)[0]) for batch in _BATCHES]
        return np.array(prefill), popular.output * np.array(decode)

    def prefill_s(self, batch: float) -> float:
        """Return seconds of a batch's prefill."""
        return float(np.interp(batch, _BATCHES, self.seconds[0]))

    def throughput(self, batch: float, prefills_s: float | None = None) -> float:
        """Return requests/s with a batch, if all models' prefills take `prefills_s`.

        None: with its own prefills only.
        """
        prefills_s = self.prefill_s(batch) if prefills_s is None else prefills_s
        return batch / (float(np.interp(batch, _BATCHES, self.seconds[1])) + prefills_s)

    def lacks(self, throughput: float) -> bool:
        """Return whether a throughput misses the model's rate (MuxServe allows 10 %, at most half a request/s)."""
        return throughput + min(0.5, 0.1 * throughput) < self.popular.rate_seq_s


@dataclass(frozen=True)
class Mesh:
    """Devices that models share; each model runs on all of them by tensor parallelism."""

    devices: tuple[int, ...]
    occupants: tuple[Occupant, ...] = ()

    @property
    def key(self) -> tuple[int, tuple[str, ...]]:
        """A key that is equal for equivalent meshes."""
        return len(self.devices), tuple(sorted(occupant.popular.name for occupant in self.occupants))


@dataclass(frozen=True)
class Placement:
    """Meshes with their models, and the estimated throughput, up to each model's rate."""

    meshes: tuple[Mesh, ...]
    throughput_seq_s: float


class Placer:
    """Finds a placement; remembers estimates."""

    def __init__(self, memory_bytes: float, other_bytes: float):
        """Set up the placer.

        `memory_bytes` is the usable memory of a device. `other_bytes` is the memory that each model needs on every
        device in addition to its weights.
        """
        self._memory, self._other = memory_bytes, other_bytes
        self._throughputs: dict[tuple[int, tuple[str, ...]], tuple[float, ...]] = {}
        self._candidates: dict[tuple[str, int], Occupant | None] = {}

    def place(
        self, models: Sequence[Popular], nodes: int, devices_per_node: int, progress: Callable[[int, int], None]
    ) -> Placement | None:
        """Return the best placement; None if no way of cutting the nodes has room for all models."""
        ordered = sorted(models, key=lambda model: -model.work)
        groups = list(mesh_groups(nodes, devices_per_node))
        most = max(len(models), min(map(len, groups)))  # several nodes, or 3 devices, never form one mesh
        best: Placement | None = None
        for number, sizes in enumerate(groups):
            progress(number, len(groups))
            if len(sizes) > most:
                continue
            placed = self._greedy(ordered, sizes, devices_per_node)
            if placed and (best is None or placed.throughput_seq_s > best.throughput_seq_s):
                best = placed
        return best

    def throughputs(self, mesh: Mesh) -> tuple[float, ...]:
        """Return requests/s of each model of a mesh, in order of names, up to its rate."""
        if mesh.key not in self._throughputs:
            self._throughputs[mesh.key] = self._estimate(mesh)
        return self._throughputs[mesh.key]

    def unit(self, models: Sequence[Popular], devices: tuple[int, ...], most_shares: float) -> Mesh | None:
        """Return these models on a mesh of these devices, each with the smallest share that sustains its rate.

        Return None if they don't fit, or if the sum of their shares is more than allowed.
        """
        mesh: Mesh | None = Mesh(devices)
        for model in models:
            mesh = self._join(mesh, model, most_shares) if mesh else None
        return mesh

    def _greedy(self, models: Sequence[Popular], sizes: Sequence[int], devices_per_node: int) -> Placement | None:
        meshes = _numbered(sizes, devices_per_node)
        total = 0.0
        for model in models:
            gains: dict[tuple[int, tuple[str, ...]], tuple[float, int, int]] = {}
            for place, mesh in enumerate(meshes):
                if mesh.key in gains or not (joined := self._join(mesh, model)):
                    continue
                gain = sum(self.throughputs(joined)) - sum(self.throughputs(mesh))
                gains[mesh.key] = (gain, -len(mesh.devices), -place)
            if not gains:
                return None
            gain, _, place = max(gains.values())
            joined = self._join(meshes[-place], model)
            assert joined is not None, "it has been tried"
            meshes[-place] = joined
            total += gain
        return Placement(tuple(meshes), total)

    def _join(self, mesh: Mesh, model: Popular, most_shares: float = MOST_SHARES) -> Mesh | None:
        """Return a mesh with one more model; None if it doesn't fit."""
        candidate = self._candidate(model, len(mesh.devices))
        if candidate is None:
            return None
        occupants = (*mesh.occupants, candidate)
        if sum(occupant.decode_share for occupant in occupants) > most_shares + 1e-9:
            return None
        joined = replace(mesh, occupants=occupants)
        return joined if self.kv_bytes(joined) >= sum(o.popular.least_bytes for o in occupants) else None

    def kv_bytes(self, mesh: Mesh) -> float:
        """Return the memory of a mesh for keys and values."""
        return self._beside([occupant.popular for occupant in mesh.occupants], len(mesh.devices))

    def _beside(self, models: Sequence[Popular], devices: int) -> float:
        """Return the memory of `devices` devices that these models leave free."""
        each = self._memory - len(models) * self._other
        return devices * each - sum(model.weight_bytes for model in models)

    def _candidate(self, model: Popular, devices: int) -> Occupant | None:
        """Return a model on a mesh with the smallest share that sustains its rate alone.

        If no share sustains it, use the share with the highest throughput.
        """
        key = model.name, devices
        if key not in self._candidates:
            self._candidates[key] = self._best_share(model, devices)
        return self._candidates[key]

    def _best_share(self, model: Popular, devices: int) -> Occupant | None:
        cost = model.cost(devices)
        room = self._beside([model], devices)
        if cost is None or room < model.least_bytes:
            return None
        most = min(MOST_SEQS, int(room / model.kv_bytes))
        reached = []
        for share in DECODE_SHARES:
            occupant = Occupant(model, devices, share, cost)
            throughput = max(occupant.throughput(batch) for batch in {*_batches(most)})
            if not occupant.lacks(throughput):
                return occupant
            reached.append((throughput, -share, occupant))
        return max(reached, key=lambda entry: entry[:2])[2]

    def _estimate(self, mesh: Mesh) -> tuple[float, ...]:
        """Return the throughputs: batches grow until all rates are sustained or the memory is full.

        The batch of the least satisfied model grows first.
        """
        occupants = sorted(mesh.occupants, key=lambda occupant: occupant.popular.name)
        room = self.kv_bytes(mesh)
        batches = [1.0] * len(occupants)
        full: set[int] = set()
        while True:
            prefills = sum(o.prefill_s(batch) for o, batch in zip(occupants, batches, strict=True))
            reached = [o.throughput(batch, prefills) for o, batch in zip(occupants, batches, strict=True)]
            lacking = [
                (tpt / o.popular.rate_seq_s, i)
                for i, (o, tpt) in enumerate(zip(occupants, reached, strict=True))
                if i not in full and o.lacks(tpt)
            ]
            if not lacking:
                return tuple(min(tpt, o.popular.rate_seq_s) for o, tpt in zip(occupants, reached, strict=True))
            _, least = min(lacking)
            more = max(1.0, batches[least] // 8)
            used = sum(o.popular.kv_bytes * batch for o, batch in zip(occupants, batches, strict=True))
            if batches[least] + more > MOST_SEQS or used + more * occupants[least].popular.kv_bytes > room:
                full.add(least)
            else:
                batches[least] += more


def _batches(most: int) -> Iterator[int]:
    yield from (batch for batch in _BATCHES if batch < most)
    yield most


def cuts(devices: int) -> list[tuple[int, ...]]:
    """Return every way to cut a node into meshes of 2^k devices, the largest first; remaining devices stay idle."""
    largest = 1 << (devices.bit_length() - 1)

    def fill(rest: int, most: int) -> Iterator[tuple[int, ...]]:
        if not rest:
            yield ()
        size = most
        while size and rest:
            if size <= rest:
                yield from ((size, *others) for others in fill(rest - size, size))
            size //= 2

    return list(fill(devices, largest))


def mesh_groups(nodes: int, devices_per_node: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to cut all nodes, which are identical."""
    for chosen in itertools.combinations_with_replacement(cuts(devices_per_node), nodes):
        yield tuple(itertools.chain.from_iterable(chosen))


def _numbered(sizes: Sequence[int], devices_per_node: int) -> list[Mesh]:
    """Return empty meshes of these sizes, their devices numbered through the cluster."""
    firsts = [0, *itertools.accumulate(sizes)]
    assert firsts[-1] % devices_per_node == 0, "whole nodes are cut"
    return [Mesh(tuple(range(first, first + size))) for first, size in zip(firsts, sizes, strict=False)]
