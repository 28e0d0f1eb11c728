"""The machine's two rates beside a profile: kept when it is taken, measured again before a run, which is predicted at
the speed that the machine has then.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from exegpt.kernels.linear import PackedLinear
from exegpt.model import BYTES, ModelSpec
from exegpt.models.device import PROCESSOR
from exegpt.models.weights import torch_dtype
from exegpt.profile import DegreeTables, LayerTables, Profile, Rates, Table
from xprofiler.recorder import Grid, Recorder
from xprofiler.timing import Timing, of_times, timed
from xrunner.ranks import Ranks

_SIZE, _READ_BYTES = 1024, 2**28
_WINDOWS, _WINDOW_S = 7, 0.014
"""Either measurement is the median of so many windows' means: with its preparation two take 0.3 s."""

PRODUCT, READ = Grid("product", ("size",), ((_SIZE,),)), Grid("read", ("bytes",), ((_READ_BYTES,),))
RATES = (PRODUCT, READ)
"""What is timed: a matrix product of `size` in each dimension, and a pass over so many bytes."""


def record_rates(recorder: Recorder, dtype: str, device: torch.device, turn: int) -> None:
    """Time both in a pass, on all ranks at once."""
    for grid, call in zip(RATES, (_product(dtype, device), _read(device)), strict=True):
        (axis,) = grid.points
        recorder.record(grid.table, axis, turn, lambda call=call: _timed(call, device))


def recorded_rates(recorder: Recorder) -> Rates:
    """The rates that were recorded."""
    return _rates(*(recorder.compiled(grid).values[0] for grid in RATES))


def measured_rates(ranks: Ranks, dtype: str, device: torch.device = PROCESSOR) -> Rates:
    """The median rank's rates now, while all ranks compute; all must call it (0.3 s)."""
    calls = _product(dtype, device), _read(device)
    return _rates(*(statistics.median(ranks.all(_timed(call, device).seconds)) for call in calls))


def _rates(product_s: float, read_s: float) -> Rates:
    return Rates(2.0 * _SIZE**3 / product_s, _READ_BYTES / read_s)


def _timed(call: Callable[[], object], device: torch.device) -> Timing:
    """On the CPU the median of some windows' means: a moment's disturbance falls on one of them alone, and where the
    cores are shared for long, a window has many of the scheduler's time slices.
    """
    if device.type != "cpu":
        return timed(call, device=device)
    call()
    return of_times([_mean(call) for _ in range(_WINDOWS)])


def _mean(call: Callable[[], object]) -> float:
    """Seconds of a call, over a window."""
    start, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - start < _WINDOW_S:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls


@torch.inference_mode()
def _product(dtype: str, device: torch.device) -> Callable[[], object]:
    weight, x = (torch.ones(_SIZE, _SIZE, device=device, dtype=torch_dtype(dtype)) for _ in range(2))
    product = PackedLinear(weight)
    return lambda: product(x)


def _read(device: torch.device) -> Callable[[], object]:
    values = torch.ones(_READ_BYTES // 4, device=device)
    return lambda: values.sum()


def slowdown(profile: Profile, now: Rates) -> tuple[float, float]:
    """How many times as long computing and reading take now as when the profile was taken; (1, 1) where it kept no
    rates.
    """
    if profile.rates is None:
        return 1.0, 1.0
    return profile.rates.flops_s / now.flops_s, profile.rates.bandwidth_bytes_s / now.bandwidth_bytes_s


def rescaled(profile: Profile, model: ModelSpec, now: Rates) -> Profile:
    """The profile at the machine's rates of now; itself where it kept no rates.

    Each point takes longer by the slowdown of computing and of reading, weighed by the seconds that its FLOPs and its
    bytes take at the profile's rates; the engine's own time by that of computing.
    """
    if profile.rates is None:
        return profile
    compute, read = slowdown(profile, now)
    scale = _Scale(compute, read, profile.rates, model, BYTES[profile.dtype])
    said = f"times {compute:.3f} for computing and {read:.3f} for reading, from {profile.fingerprint}"
    return replace(
        profile,
        degrees=tuple(map(scale.degree, profile.degrees)),
        overhead=replace(profile.overhead, values=tuple(v * compute for v in profile.overhead.values)),
        provenance=profile.provenance | {"scaled": said},
        rates=now,
    )


@dataclass(frozen=True)
class _Scale:
    """How a profile's tables change with the rates."""

    compute: float
    read: float
    then: Rates
    model: ModelSpec
    width: int
    """Bytes of a value."""

    def degree(self, tables: DegreeTables) -> DegreeTables:
        """All tables of a tensor-parallel degree."""
        return replace(
            tables,
            decoder=self._layer(tables.decoder, tables.tp, encoder=False),
            encoder=tables.encoder and self._layer(tables.encoder, tables.tp, encoder=True),
            embedding=self._points(tables.embedding, lambda tokens: (0.0, tokens)),
            head=self._products(tables.head, [(self.model.vocab, self.model.hidden)]),
        )

    def _layer(self, tables: LayerTables, tp: int, encoder: bool) -> LayerTables:
        heads, size = self.model.heads // tp, self.model.head_size
        cached = 2.0 * -(-self.model.kv_heads // tp) * size * self.width

        def attention(batch: float, new: float, past: float) -> tuple[float, float]:
            """`new` tokens of each of `batch` sequences after `past` ones: FLOPs and bytes."""
            seen = past + new / (1 if encoder else 2)
            moved = (past + new) * cached + 2.0 * new * heads * size * self.width
            return 4.0 * batch * new * seen * heads * size, batch * moved

        cross = tables.cross_projection
        return replace(
            tables,
            rest=self._products(tables.rest, self.model.token_matrices(tp, encoder)),
            encode_attention=self._points(tables.encode_attention, lambda b, s: attention(b, s, 0.0)),
            chunk_attention=self._points(tables.chunk_attention, lambda c, p: attention(1.0, c, p)),
            decode_attention=self._points(tables.decode_attention, lambda b, c: attention(b, 1.0, c - 1.0)),
            cross_projection=cross and self._products(cross, [self.model.cross_projection(tp)]),
        )

    def _products(self, table: Table, shapes: Sequence[tuple[int, int]]) -> Table:
        """A table by rows of matrix products of (outputs, inputs)."""
        weights = float(sum(n * k for n, k in shapes))
        states = float(sum(n + k for n, k in shapes))
        return self._points(table, lambda rows: (2.0 * rows * weights, (weights + rows * states) * self.width))

    def _points(self, table: Table, work: Callable[..., tuple[float, float]]) -> Table:
        """A table of which `work` gives FLOPs and bytes by coordinates."""
        factors = [self._factor(*work(*at)) for at in itertools.product(*table.points)]
        return replace(table, values=tuple(v * f for v, f in zip(table.values, factors, strict=True)))

    def _factor(self, flops: float, moved: float) -> float:
        computing, reading = flops / self.then.flops_s, moved / self.then.bandwidth_bytes_s
        return (computing * self.compute + reading * self.read) / (computing + reading)
