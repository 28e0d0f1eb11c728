"""Times of iterations with speculation: attention over drafted tokens, and the drafting itself on the last stage.

An iteration verifies γ + 1 tokens of each sequence. Attention reads a sequence's keys and values once for all of them,
but computes the scores of each. Products run over all tokens (`Group.rows`).

Drafting takes γ passes through the drafting layers. The first pass is over all tokens of the iteration, prompts
included, since the drafting layers keep keys and values of their own. The other γ - 1 passes have one token of each
sequence. Every pass ends with an output head. All of this is added to the layers of the last stage, which drafts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from xcore.arrays import Array
from xcore.specs.device_spec import DeviceSpec
from xcore.specs.model import ModelSpec
from xcore.specs.profile import DegreeTables, LayerTables, Table

Seconds = Callable[[Array, Array], Array]
"""Seconds as a function of batch and context."""
Points = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Drafting:
    """The drafter: `layers` layers with these tables, and their embedding and head."""

    tables: DegreeTables
    layers: float
    model: ModelSpec


@dataclass(frozen=True)
class Verification:
    """Attention over the γ + 1 tokens of each decoding sequence on one device."""

    device: DeviceSpec
    rows: int

    def attention(self, model: ModelSpec, tables: DegreeTables) -> Seconds:
        """Return the seconds of one layer's attention over `rows` tokens, as a function of batch and context.

        The measured time is that of one token, which mostly reads keys and values. The `rows` tokens take as long,
        unless their scores take longer. If the device's rate is unknown, the time is in proportion to the tokens.
        """
        one = tables.decoder.decode_attention
        rate = max((self.device.flops_s.get(half, 0.0) for half in ("bf16", "fp16")), default=0.0)
        rate *= self.device.attention_fraction

        def seconds(batch: Array, context: Array) -> Array:
            if not rate:
                return np.asarray(self.rows * one(batch, context))
            seen = np.vectorize(lambda tokens: model.seen(1.0, max(tokens - 1.0, 0.0)), otypes=[float])(context)
            pair = model.latent.decode_pair if model.latent else 2 * model.head_size
            macs = seen * (model.heads / tables.tp) * pair
            if model.latent and model.latent.index:
                macs = macs + context * model.latent.index.heads * model.latent.index.head_size
            return np.asarray(np.maximum(one(batch, context), 2.0 * self.rows * batch * macs / rate))

        return seconds


def verifying(tables: DegreeTables, model: ModelSpec, verification: Verification) -> DegreeTables:
    """Return the tables of stages that verify drafted tokens and draft none."""
    return _with(tables, verification.attention(model, tables), 1.0, None)


def drafting(
    tables: DegreeTables, model: ModelSpec, verification: Verification, drafts: Drafting, layers: int
) -> DegreeTables:
    """Return the tables of a last stage of `layers` layers, which also drafts."""
    share, passes = drafts.layers / layers, verification.rows - 2
    own, first = drafts.tables, verification.attention(drafts.model, drafts.tables)
    verified = verification.attention(model, tables)

    def decoding(batch: Array, context: Array) -> Array:
        each = own.decoder.rest(batch) + own.decoder.decode_attention(batch, context)
        ends = (passes + 1) * (own.head(batch) + own.embedding(batch)) / layers
        return np.asarray(verified(batch, context) + share * (first(batch, context) + passes * each) + ends)

    return _with(tables, decoding, share, own)


def _with(tables: DegreeTables, decoding: Seconds, share: float, drafts: DegreeTables | None) -> DegreeTables:
    """Return the tables with these seconds of decoding attention, and `share` of the drafts' layer in each layer."""
    layer, also = tables.decoder, drafts.decoder if drafts else None
    one, batches = layer.decode_attention, {*layer.decode_attention.points[0]}
    if drafts:
        own = (*drafts.decoder.rest.points[0], *drafts.head.points[0], *drafts.decoder.decode_attention.points[0])
        batches |= {n for n in own if n <= max(batches)}
    contexts = {*one.points[1], *(also.decode_attention.points[1] if also else ())}
    points = tuple(sorted(batches)), tuple(sorted(contexts))
    decode = _tabulated(one.axes, points, decoding(*_grid(points)))
    changed = {name: _sum(getattr(layer, name), getattr(also, name), share) for name in _ADDED} if also else {}
    mixed = layer.mixed_attention and _mixed(layer, layer.mixed_attention, decode, share if also else 0.0)
    return replace(tables, decoder=replace(layer, **changed, decode_attention=decode, mixed_attention=mixed))


_ADDED = ("rest", "encode_attention", "chunk_attention")
"""Tables of a layer that the drafts' first pass adds to."""


def _mixed(layer: LayerTables, table: Table, decode: Table, share: float) -> Table:
    """Return attention of prompts together with decoding: decoding is longer as it is alone."""
    chunk, past, decodes, context = _grid(table.points)
    batch = np.maximum(decodes, 1.0)
    longer = decode(batch, context) - (1.0 + share) * layer.decode_attention(batch, context)
    seconds = (1.0 + share) * table(chunk, past, decodes, context) + (decodes > 0) * np.maximum(longer, 0)
    return _tabulated(table.axes, table.points, seconds)


def _sum(table: Table, other: Table, share: float) -> Table:
    """Return `table` + `share` · `other`, exact where both are linear."""
    points = tuple(tuple(sorted({*a, *b})) for a, b in zip(table.points, other.points, strict=True))
    at = _grid(points)
    return _tabulated(table.axes, points, table(*at) + share * other(*at))


def _grid(points: Points) -> tuple[Array, ...]:
    """Return the coordinates of a grid's points along each axis."""
    return np.meshgrid(*(np.array(along, dtype=np.float64) for along in points), indexing="ij")


def _tabulated(axes: tuple[str, ...], points: Points, seconds: ArrayLike) -> Table:
    return Table(axes, points, tuple(np.broadcast_to(seconds, [len(along) for along in points]).ravel().tolist()))
