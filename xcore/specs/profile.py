"""Profile: times of one layer, the embedding, the head and the engine, as tables over a measured grid."""

import bisect
import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from xcore.arrays import Array, Flags
from xcore.errors import InputError
from xcore.interpolation import bilinear, bilinear_at, linear, linear_at
from xcore.spec import Spec
from xcore.specs.model import BYTES, ModelSpec, usual_kv_dtype

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema
    from pydantic_core.core_schema import SerializerFunctionWrapHandler


@dataclass(frozen=True)
class Table(Spec):
    """Seconds over a rectangular grid, linear between its points.

    `points[i]` are the increasing coordinates along `axes[i]`. `values` are the grid's seconds in row-major order, and
    `spread` their relative interquartile ranges if they were measured. `filled` are the places in `values` that
    complete the rectangle without a measurement. Beyond the grid the outermost cell's slope is extrapolated; `covers`
    returns False for queries that need that, or a filled value.
    """

    axes: tuple[str, ...]
    points: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]
    spread: tuple[float, ...] | None = None
    filled: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        size = int(np.prod([len(p) for p in self.points])) if self.points else 0
        if len(self.axes) != len(self.points) or size != len(self.values) or not size:
            raise InputError(f"A table over {self.axes} needs {size} values on its grid (got {len(self.values)}).")
        if not all(a < b for p in self.points for a, b in itertools.pairwise((-math.inf, *p, math.inf))):
            raise InputError(f"The grid of a table over {self.axes} must increase along each axis and be finite.")
        if not np.isfinite(self.values).all() or min(self.values) < 0:
            raise InputError(f"A table over {self.axes} has times that are negative or not finite.")
        if self.filled and not 0 <= min(self.filled) <= max(self.filled) < size:
            raise InputError(f"A table over {self.axes} lists filled values that it does not have.")

    @functools.cached_property
    def _grid(self) -> tuple[tuple[Array, ...], Array]:
        points = tuple(np.asarray(p, dtype=np.float64) for p in self.points)
        return points, np.asarray(self.values, dtype=np.float64).reshape([len(p) for p in points])

    def __call__(self, *at: ArrayLike) -> Array | float:
        """Return the seconds at the given coordinates, one per axis; arrays broadcast together. Never negative."""
        points, values = self._grid
        if len(self.values) == 1:
            return max(self.values[0], 0.0)
        if len(points) == 1:
            x = np.asarray(at[0], dtype=np.float64, order="C")
            seconds = np.empty(x.shape)
            linear(points[0], values, x, seconds)
            return seconds
        if len(points) == 2:
            x, y = (np.asarray(a, dtype=np.float64, order="C") for a in at)
            if x.shape != y.shape:
                x, y = _broadcast(x, y)
            seconds = np.empty(x.shape)
            bilinear(points[0], points[1], values, x, y, seconds)
            return seconds
        lower, fraction = [], []
        for p, x in zip(points, np.broadcast_arrays(*[np.asarray(a, dtype=np.float64) for a in at]), strict=True):
            if len(p) == 1:  # an axis with one point: constant along it
                lower.append(np.zeros(x.shape, dtype=np.intp))
                fraction.append(np.zeros(x.shape))
                continue
            i = np.clip(np.searchsorted(p, x, side="right") - 1, 0, len(p) - 2)
            lower.append(i)
            fraction.append((x - p[i]) / (p[i + 1] - p[i]))
        total: Array | float = 0.0
        for corner in itertools.product((0, 1), repeat=len(points)):
            weight: Array | float = 1.0
            index = []
            for axis, up in enumerate(corner):
                weight = weight * (fraction[axis] if up else 1.0 - fraction[axis])
                index.append(np.minimum(lower[axis] + up, len(points[axis]) - 1))
            total = total + weight * values[tuple(index)]
        return np.maximum(total, 0.0)

    def at(self, *where: float) -> float:
        """Return the seconds at one point: the same as calling the table, without the cost of arrays."""
        points, values = self._grid
        if len(points) == 1:
            return linear_at(points[0], values, *where)
        if len(points) == 2:
            return bilinear_at(*points, values, *where)
        cells: list[tuple[tuple[int, float], ...]] = []
        for p, x in zip(self.points, where, strict=True):
            if len(p) == 1:
                cells.append(((0, 1.0),))
                continue
            i = min(max(bisect.bisect_right(p, x) - 1, 0), len(p) - 2)
            up = (x - p[i]) / (p[i + 1] - p[i])
            cells.append(((i, 1.0 - up), (i + 1, up)))
        corners = [(0, 1.0)]
        for p, cell in zip(self.points, cells, strict=True):
            corners = [(index * len(p) + i, weight * w) for index, weight in corners for i, w in cell]
        return max(sum(weight * self.values[index] for index, weight in corners), 0.0)

    @functools.cached_property
    def _filled(self) -> Flags:
        """Return for each value of the grid whether it was filled."""
        filled = np.zeros(len(self.values), dtype=bool)
        filled[list(self.filled or ())] = True
        return filled.reshape([len(p) for p in self.points])

    def covers(self, *at: ArrayLike) -> bool:
        """Return whether every query lies within the grid, between measured values."""
        for p, x in zip(self.points, at, strict=True):
            a = np.asarray(x)
            if len(p) > 1 and a.size and (a.min() < p[0] - 1e-9 or a.max() > p[-1] + 1e-9):
                return False
        if not self.filled:
            return True
        neighbours = []  # along each axis the point below and the point above, the same one for a query on a point
        for p, x in zip(self.points, np.broadcast_arrays(*at), strict=True):
            below = np.clip(np.searchsorted(p, x, side="right") - 1, 0, len(p) - 1)
            neighbours.append((below, np.minimum(np.searchsorted(p, x, side="left"), len(p) - 1)))
        return not any(self._filled[corner].any() for corner in itertools.product(*neighbours))


def _broadcast(*arrays: Array) -> list[Array]:
    """Broadcast arrays as `numpy.broadcast_arrays`, contiguous: a quarter of its time for small ones."""
    shape = np.broadcast(*arrays).shape
    full = [np.empty(shape) for _ in arrays]
    for out, array in zip(full, arrays, strict=True):
        out[...] = array
    return full


def _check_axes(spec: Spec, **axes: int) -> None:
    """Raise InputError unless the named tables of a spec have the given numbers of axes."""
    for name, count in axes.items():
        table = getattr(spec, name)
        if table and len(table.axes) != count:
            raise InputError(f"A profile's table '{name}' has the axes {', '.join(table.axes)}: it must have {count}.")


@dataclass(frozen=True)
class LayerTables(Spec):
    """One layer on one of `tp` devices: seconds of its attention kernel by shape, and of everything else by tokens.

    Attention over a batch of unequal lengths costs the mean over batches of each length.
    """

    rest: Table
    """[tokens]: norms, matrix products, activation, and the all-reduces where `tp` > 1."""
    encode_attention: Table
    """[batch, length]: `batch` whole prompts of `length` tokens."""
    chunk_attention: Table
    """[chunk, past]: `chunk` tokens of one prompt of which `past` are already in the cache."""
    decode_attention: Table
    """[batch, context]: one new token for each of `batch` sequences of `context` tokens, including the new one.

    In an encoder-decoder the context is the input, which cross-attention reads, and the output so far.
    """
    mixed_attention: Table | None = None
    """[chunk, past, decodes, context]: prompts and decoding in one attention kernel, if the engine has such a kernel.

    `chunk` prompt tokens after `past` cached ones run together with `decodes` sequences of `context` tokens. Without
    prompts `decode_attention` counts.
    """
    cross_projection: Table | None = None
    """[tokens]: keys and values of `tokens` encoded tokens, which an encoder-decoder's decoder layer computes once."""

    def __post_init__(self) -> None:
        attention = {"encode_attention": 2, "chunk_attention": 2, "decode_attention": 2, "mixed_attention": 4}
        _check_axes(self, rest=1, cross_projection=1, **attention)


@dataclass(frozen=True)
class DegreeTables(Spec):
    """Everything that depends on the tensor-parallel degree `tp` (seconds)."""

    tp: int
    decoder: LayerTables
    embedding: Table
    """[tokens]"""
    head: Table
    """[rows]: final norm, output head and sampling for `rows` sequences."""
    encoder: LayerTables | None = None

    def __post_init__(self) -> None:
        _check_axes(self, embedding=1, head=1)


@dataclass(frozen=True)
class Profile(Spec):
    """The times that a device, or a group of devices, needs for each part of an iteration, and their source."""

    version: int
    source: str
    """`measured`, `operators` or `roofline`."""
    model: str
    """`ModelSpec.fingerprint` of its model."""
    dtype: str
    device: str
    degrees: tuple[DegreeTables, ...]
    overhead: Table
    """[batch]: the engine's own time per iteration, whatever the layers: bookkeeping, batch assembly, results."""
    send: Table
    """[bytes]: point to point between neighbouring stages of one node."""
    send_between_nodes: Table
    """[bytes]: point to point between nodes."""
    provenance: dict[str, str] = field(default_factory=dict)
    """Measured hardware and software, or the assumed rates."""
    host_copy: Table | None = None
    """[bytes]: from a device to pinned host memory, or back; None: as long as a send."""
    switch: Table | None = None
    """[bytes]: extra seconds of an iteration on one device after other models', by the bytes of their weights there.

    None: not measured.
    """
    layers: str | None = None
    """`ModelSpec.layers_fingerprint`, which identifies its model; None: a version that matched the context too."""
    in_flight: int = 1
    """Iterations between the decision of one and its end (`EngineSpec.in_flight`)."""
    front_end_s: float = 0.0
    """Seconds of each request outside the engine (`EngineSpec.front_end_s`).

    They are part of times to first token and of latencies since arrival, but no device is busy with them.
    """
    merged_blocks: float | None = None
    """Factor by which iterations take longer where models share a memory's KV blocks; None: not measured."""
    draft: tuple[DegreeTables, ...] | None = None
    """Times of a separate draft model (`Speculation.draft`), by its tensor-parallel degree; not part of files."""

    VERSION = 1

    @property
    def kv_dtype(self) -> str:
        """Return the dtype of the keys and values that its times are for."""
        return self.provenance.get("kv_dtype") or usual_kv_dtype(self.dtype)

    @property
    def spread(self) -> float:
        """Return how much the profile's times varied while they were measured; 0 if nothing was measured.

        This is the interquartile range over the median, averaged over the table that varies most.
        """
        layer = self.degrees[0].decoder
        tables = (layer.rest, layer.encode_attention, layer.decode_attention, self.degrees[0].head)
        return max((sum(table.spread) / len(table.spread) for table in tables if table.spread), default=0.0)

    def __post_init__(self) -> None:
        if self.version != Profile.VERSION:
            raise InputError(
                f"This profile has version {self.version}, but this version of exegpt reads version "
                f"{Profile.VERSION}: run `exegpt profile` again."
            )
        _check_axes(self, overhead=1, send=1, send_between_nodes=1, host_copy=1, switch=1)
        if not self.degrees or min(tables.tp for tables in self.degrees) < 1:
            raise InputError("A profile needs the tables of at least one tensor-parallel degree of at least 1.")
        if not 1 <= self.in_flight <= 2 or not 0 <= self.front_end_s <= 60:
            raise InputError(
                f"This profile has {self.in_flight} iterations in flight and {self.front_end_s} s of front-end "
                "time: it must have 1 or 2 iterations and 0 to 60 s."
            )
        if self.merged_blocks is not None and not 1 <= self.merged_blocks <= 100:
            raise InputError(
                f"This profile has a factor of {self.merged_blocks} for merged blocks: it must be from 1 to 100."
            )
        if self.dtype not in BYTES:
            raise InputError(f"This profile has the unknown dtype '{self.dtype}': use one of {', '.join(BYTES)}.")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return sixteen hex digits of the tables' content."""
        from xcore.document import fingerprint, to_dict

        content = to_dict(self)
        content.pop("layers", None)  # it follows from the model
        for name, default in (("in_flight", 1), ("front_end_s", 0.0), ("merged_blocks", None)):
            if content[name] == default:  # profiles from before these fields keep their fingerprints
                del content[name]
        return fingerprint(content)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """Leave a draft model's times out of files: they follow from the schedule."""
        from pydantic_core import core_schema  # only what reads or writes documents calls this

        def write(profile: Profile, serialize: "SerializerFunctionWrapHandler") -> dict[str, object]:
            written: dict[str, object] = serialize(profile)
            del written["draft"]
            return written

        plain = core_schema.wrap_serializer_function_ser_schema(write)
        return core_schema.no_info_wrap_validator_function(
            lambda data, validate: validate(data), handler(source), serialization=plain
        )

    def is_for(self, model: ModelSpec) -> bool:
        """Return whether the profile is for this model; the context may differ."""
        return self.model == model.fingerprint or self.layers == model.layers_fingerprint

    def degree(self, tp: int) -> DegreeTables:
        """Return the tables of a tensor-parallel degree; InputError if it was not profiled."""
        for tables in self.degrees:
            if tables.tp == tp:
                return tables
        have = ", ".join(str(d.tp) for d in self.degrees)
        raise InputError(f"This profile has no tensor-parallel degree {tp}: it has {have}.")

    def switch_seconds(self, other_bytes: float, tp: int) -> float:
        """Return the extra seconds of an iteration on `tp` devices after other models' iterations.

        `other_bytes` are the bytes of their weights on each device.
        """
        return self.switch.at(min(other_bytes, self.switch.points[0][-1])) / tp if self.switch else 0.0
