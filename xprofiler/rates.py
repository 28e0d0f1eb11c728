"""The machine's speed relative to its profile.

A run times the model's layers again at two numbers of tokens, one bound by reading memory and one by computing, and its
head; its prediction is scaled by the change.

The layers themselves are timed, since no other read has their cache behaviour: on one machine, the time of a pass over
memory varied by a third while the layers' times stayed the same.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from xcore.specs.model import BYTES, ModelSpec
from xcore.specs.profile import DegreeTables, LayerTables, Profile, Table
from xprofiler.measure import cold_layers, head_pass, layer_pass
from xprofiler.reuse import Reuse
from xprofiler.timing import timed
from xrunner.comm.ranks import Ranks
from xrunner.models import Model

_READS, _COMPUTES = 16, 260
"""Tokens of a pass that is mostly reading the weights, and of one that is bound by computing.

Over a single token, passes in a row differ by a fifth, with what caches keep of the weights.
"""
_CALLS = {_READS: 9, _COMPUTES: 3}
"""Number of calls of each, 0.3 s in all; fixed, since ranks of a tensor-parallel group must make the same calls."""
_WARM_UPS = 20
"""Calls before the first timed ones.

After a pause, and over new memory, a CPU takes 0.2 s to reach its speed. Without them, the head was 15 % slower than in
a profile, which computes without a pause.
"""


Work = Callable[[float], tuple[float, float]] | Callable[[float, float], tuple[float, float]]
"""FLOPs and bytes by one or two coordinates."""


@dataclass(frozen=True)
class Slowdown:
    """The machine's times divided by those of its profile."""

    compute: float = 1.0
    read: float = 1.0
    """Slowdown of reading weights, one of a layer's matrices after the other."""
    stream: float = 1.0
    """Slowdown of large reads, as by the head and by attention.

    With another busy process, threads then wait for each other once.
    """


@torch.inference_mode()
def measured_slowdown(profile: Profile, model: Model, ranks: Ranks) -> Slowdown:
    """Return the median rank's slowdown now, while all ranks compute; all must call it (0.3 s)."""
    ratios, reuse = {}, Reuse(model)

    def timing(call: Callable[[], object], tokens: int, before: Callable[[], object]) -> float:
        calls = {"least": _CALLS[tokens], "most": _CALLS[tokens], "warm_ups": _WARM_UPS if tokens == _READS else 1}
        # Ranks that sum make the same calls: their own clocks may not decide how many.
        together = {"together": 1} if model.shard.of > 1 else {}
        return timed(call, device=model.device, before=before, **calls, **together).seconds

    if model.layers:  # an encoder-decoder's encoding side has none
        table = profile.degree(model.shard.of).decoder.rest
        layers = min(len(model.layers), cold_layers(model.spec, model.dtype, model.shard.of, model.device))
        for tokens in (_READS, _COMPUTES):
            measured = _measured(table, tokens)
            seconds = timing(layer_pass(model, int(measured), most=layers), tokens, reuse.layers(tokens))
            ratios[str(tokens)] = seconds / layers / table.at(measured)
    if model.head:
        seconds = timing(head_pass(model, _READS), _READS, reuse.ends(_READS))
        ratios["head"] = seconds / profile.degree(model.shard.of).head.at(float(_READS))
    of_ranks = ranks.all(ratios)

    def median(name: str) -> float:
        return statistics.median(ratios[name] for ratios in of_ranks if name in ratios)

    return Slowdown(median(str(_COMPUTES)), median(str(_READS)), median("head"))


def _measured(table: Table, tokens: int) -> float:
    """Return `tokens`, the number to which they are padded, or the largest: extrapolated noise may reach 0 seconds."""
    points = table.points[0]
    above = next((point for point in points if point >= tokens), points[-1])
    return above if above < tokens or table.at(above) == table.at(float(tokens)) else float(tokens)


def rescaled(profile: Profile, model: ModelSpec, slowdown: Slowdown) -> Profile:
    """Return the profile at the machine's present speed.

    Each point takes longer by the slowdowns of computing and of reading. They are weighted by the seconds that its
    FLOPs and bytes take at the rates of the profile's own two passes. The engine's own time, of one thread, changes by
    the least slowdown.
    """
    table, width = profile.degrees[0].decoder.rest, BYTES[profile.dtype]
    weights = float(sum(n * k for n, k in model.token_matrices(profile.degrees[0].tp)))
    computes, reads = _measured(table, _COMPUTES), _measured(table, _READS)
    flops_s, bytes_s = 2.0 * computes * weights / table.at(computes), weights * width / table.at(reads)
    scale = _Scale(slowdown, flops_s, bytes_s, model, width)
    least = min(slowdown.compute, slowdown.read, slowdown.stream)
    rates = f"{slowdown.compute:.3f} for computing, {slowdown.read:.3f} for reading, {slowdown.stream:.3f} for streams"
    said = f"times {rates}, from {profile.fingerprint}"
    return replace(
        profile,
        degrees=tuple(map(scale.degree, profile.degrees)),
        overhead=_times(profile.overhead, least),
        switch=profile.switch and _times(profile.switch, slowdown.read),
        provenance=profile.provenance | {"scaled": said},
    )


def _times(table: Table, factor: float) -> Table:
    return replace(table, values=tuple(value * factor for value in table.values))


@dataclass(frozen=True)
class _Scale:
    """The change of a profile's tables with the machine's speed."""

    slowdown: Slowdown
    flops_s: float
    bandwidth_bytes_s: float
    model: ModelSpec
    width: float
    """Bytes of a value."""

    def degree(self, tables: DegreeTables) -> DegreeTables:
        """Return all scaled tables of a tensor-parallel degree."""
        return replace(
            tables,
            decoder=self._layer(tables.decoder, tables.tp, encoder=False),
            encoder=tables.encoder and self._layer(tables.encoder, tables.tp, encoder=True),
            embedding=self._points(tables.embedding, lambda tokens: (0.0, tokens)),
            head=self._products(tables.head, [(self.model.vocab, self.model.hidden)], self.slowdown.stream),
        )

    def _layer(self, tables: LayerTables, tp: int, encoder: bool) -> LayerTables:
        heads, size = self.model.heads // tp, self.model.head_size
        cached = 2.0 * -(-self.model.kv_heads // tp) * size * self.width

        def attention(batch: float, new: float, past: float) -> tuple[float, float]:
            """Return FLOPs and bytes of `new` tokens of each of `batch` sequences after `past` tokens."""
            seen = past + new / (1 if encoder else 2)
            moved = (past + new) * cached + 2.0 * new * heads * size * self.width
            return 4.0 * batch * new * seen * heads * size, batch * moved

        cross, stream = tables.cross_projection, self.slowdown.stream
        return replace(
            tables,
            rest=self._products(tables.rest, self.model.token_matrices(tp, encoder)),
            encode_attention=self._points(tables.encode_attention, lambda b, s: attention(b, s, 0.0), stream),
            chunk_attention=self._points(tables.chunk_attention, lambda c, p: attention(1.0, c, p), stream),
            decode_attention=self._points(tables.decode_attention, lambda b, c: attention(b, 1.0, c - 1.0), stream),
            cross_projection=cross and self._products(cross, [self.model.cross_projection(tp)]),
        )

    def _products(self, table: Table, shapes: Sequence[tuple[int, int]], read: float | None = None) -> Table:
        """Return a scaled table by rows of matrix products of (outputs, inputs)."""
        weights = float(sum(n * k for n, k in shapes))
        states = float(sum(n + k for n, k in shapes))
        return self._points(table, lambda rows: (2.0 * rows * weights, (weights + rows * states) * self.width), read)

    def _points(self, table: Table, work: Work, read: float | None = None) -> Table:
        """Return a scaled table; `work` gives FLOPs and bytes by coordinates.

        `read` is the slowdown of reading the table's data; None: the slowdown of reading layers.
        """
        works = itertools.starmap(work, itertools.product(*table.points))
        factors = [self._factor(flops, moved, read or self.slowdown.read) for flops, moved in works]
        return replace(table, values=tuple(v * f for v, f in zip(table.values, factors, strict=True)))

    def _factor(self, flops: float, moved: float, read: float) -> float:
        computing, reading = flops / self.flops_s, moved / self.bandwidth_bytes_s
        return (computing * self.slowdown.compute + reading * read) / (computing + reading)
