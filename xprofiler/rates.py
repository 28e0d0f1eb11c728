"""The machine's speed relative to its profile.

A run times the parts of the model again: its layers at numbers of tokens that are bound by reading memory and at others
that are bound by computing, decoding attention, and the head. Its prediction is scaled by the change.

The layers themselves are timed, since no other read has their cache behaviour: on one machine, the time of a pass over
memory varied by a third while the layers' times stayed the same.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from xcore.specs.model import BYTES, ModelSpec
from xcore.specs.profile import DegreeTables, LayerTables, Profile, Table
from xcore.specs.slowdown import Slowdown
from xprofiler.iteration import Iteration, Part
from xprofiler.measure import cold_layers
from xprofiler.timing import timed
from xrunner.comm.ranks import Ranks
from xrunner.models import Model

_READS, _COMPUTES = (4, 12, 24, 48), (132, 260)
"""Tokens of passes that mostly read the weights, and of passes that are bound by computing.

Over a single token, passes in a row differ by a fifth, with what caches keep of the weights. Each point of a profile is
off by up to 6 %, so several are compared.
"""
_CALLS = 4
"""Number of calls of each; fixed, since ranks of a tensor-parallel group must make the same calls."""
_WARM_UPS = 20
"""Calls before the first timed ones.

After a pause, and over new memory, a CPU takes 0.2 s to reach its speed. Without them, the head was 15 % slower than in
a profile, which computes without a pause.
"""


Work = Callable[[float], tuple[float, float]] | Callable[[float, float], tuple[float, float]]
"""FLOPs and bytes by one or two coordinates."""


@torch.inference_mode()
def measured_slowdown(profile: Profile, model: Model, ranks: Ranks) -> Slowdown:
    """Return the median rank's slowdown now, while all ranks compute; all must call it (0.5 s)."""
    of_ranks = ranks.all(_Present(profile, model).ratios())

    def median(name: str) -> float:
        return statistics.median(ratios[name] for ratios in of_ranks if name in ratios)

    # On a GPU, attention isn't timed here: it is a large read, as the head is.
    attention = "attention" if any("attention" in ratios for ratios in of_ranks) else "head"
    return Slowdown(median("compute"), median("read"), median("head"), median(attention))


class _Present:
    """The present times of one rank's parts of a model beside its profile's."""

    def __init__(self, profile: Profile, model: Model):
        self._model, self._tables = model, profile.degree(model.shard.of)
        self._layers = min(len(model.layers), cold_layers(model.spec, model.dtype, model.shard.of, model.device))
        self._iteration = Iteration(model, most=self._layers)
        self._warm_ups = _WARM_UPS

    def ratios(self) -> dict[str, float]:
        """Return the present times of the parts that the model has, divided by the profile's."""
        ratios, tables, iteration = {}, self._tables, self._iteration
        if self._model.layers:  # an encoder-decoder's encoding side has none
            rest = tables.decoder.rest
            for name, tokens in (("read", _READS), ("compute", _COMPUTES)):
                measured = [_measured(rest, number) for number in tokens]
                ratios[name] = self._ratio(iteration.layers, rest.at, measured) / self._layers
            if self._model.device.type == "cpu":
                attention, context = tables.decoder.decode_attention, float(iteration.context)
                ratios["attention"] = self._ratio(
                    iteration.decoding,
                    lambda batch: attention.at(batch, context),
                    [_measured(attention, batch) for batch in _READS],
                )
        if self._model.head or self._model.shard.of > 1:
            rows = [_measured(tables.head, rows) for rows in _READS]
            head = self._ratio(iteration.head, tables.head.at, rows)
            ratios |= {"head": head} if self._model.head else {}
        return ratios

    def _ratio(self, part: Callable[[int], Part], expected: Callable[[float], float], tokens: Sequence[float]) -> float:
        """Return the seconds of a part on several numbers of tokens, divided by the `expected` ones."""
        seconds = sum(self._seconds(part(int(number))) for number in tokens)
        return seconds / sum(expected(float(number)) for number in tokens)

    def _seconds(self, part: Part) -> float:
        warm_ups, self._warm_ups = self._warm_ups, 1
        # Ranks that sum make the same calls: their own clocks may not decide how many.
        together = {"together": 1} if self._model.shard.of > 1 else {}
        return timed(
            part.call,
            least=_CALLS,
            most=_CALLS,
            device=self._model.device,
            before=part.before,
            untimed=part.untimed,
            warm_ups=warm_ups,
            **together,
        ).seconds


def _measured(table: Table, tokens: int) -> float:
    """Return `tokens`, the number to which they are padded, or the largest: extrapolated noise may reach 0 seconds."""
    points = table.points[0]
    above = next((point for point in points if point >= tokens), points[-1])
    if above < tokens or (len(table.points) == 1 and table.at(above) == table.at(float(tokens))):
        return above
    return float(tokens)


def rescaled(profile: Profile, model: ModelSpec, slowdown: Slowdown) -> Profile:
    """Return the profile at the machine's present speed.

    Each point takes longer by the slowdowns of computing and of reading. They are weighted by the seconds that its
    FLOPs and bytes take at the rates of the profile's own two passes. The engine's own time, of one thread, changes by
    the least slowdown.
    """
    table, width = profile.degrees[0].decoder.rest, BYTES[profile.dtype]
    weights = float(sum(n * k for n, k in model.token_matrices(profile.degrees[0].tp)))
    computes, reads = _measured(table, _COMPUTES[-1]), _measured(table, _READS[1])
    flops_s, bytes_s = 2.0 * computes * weights / table.at(computes), weights * width / table.at(reads)
    scale = _Scale(slowdown, flops_s, bytes_s, model, width)
    rates = ", ".join(f"{factor:.3f} for {name}" for name, factor in asdict(slowdown).items())
    said = f"times {rates}, from {profile.fingerprint}"
    return replace(
        profile,
        degrees=tuple(map(scale.degree, profile.degrees)),
        overhead=_times(profile.overhead, min(slowdown.factors)),
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

        cross, read = tables.cross_projection, self.slowdown.attention
        return replace(
            tables,
            rest=self._products(tables.rest, self.model.token_matrices(tp, encoder)),
            encode_attention=self._points(tables.encode_attention, lambda b, s: attention(b, s, 0.0), read),
            chunk_attention=self._points(tables.chunk_attention, lambda c, p: attention(1.0, c, p), read),
            decode_attention=self._points(tables.decode_attention, lambda b, c: attention(b, 1.0, c - 1.0), read),
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
