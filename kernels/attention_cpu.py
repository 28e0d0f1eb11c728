"""Attention over a paged cache on the CPU, compiled by numba.

Both halves of attention are products of a narrow tile with one block of the cache. The scores of 16 tokens are `q
[rows, head_size] · K [head_size, block]`; the output is `p [rows, block] · V [block, head_size]`. Keys are stored
transposed, so that both products read the block as contiguous vectors and sum along registers, never across one. The
product is written in LLVM's vector types: its accumulators must stay in registers, which loops over arrays don't
achieve.
"""

import functools
from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from exegpt.kernels.bfloat16 import rounded, widened
from exegpt.kernels.exponential import exp
from exegpt.kernels.greatest import greatest
from exegpt.kernels.kernel_dtypes import Kernel, njit_by_dtype
from exegpt.kernels.kv_int8 import SCALE_BYTES
from exegpt.kernels.llvm_vectors import (
    FLOAT,
    INDEX,
    byte_pointer,
    element_pointer,
    fetch,
    has_evens_and_odds,
    item_bytes,
    load_evens_and_odds,
    load_floats,
    multiply_add,
    splat,
)
from exegpt.kernels.numba_jit import njit

_REGISTERS = 256
"""Floats that one tile accumulates at a time: half of AVX-512's registers."""
_AHEAD = 3
"""Blocks of a head, at least, between the one that is fetched and the one that is used.

Blocks lie scattered in memory, so the hardware can't predict the next one.
"""
_LINE = 64
"""Bytes of a line of the CPU's caches."""
_ROWS = 8
"""Rows of a tile of prompt tokens: their K and V are read once for all of them."""


def _split(depth: int | ir.Value, accumulate: bool) -> int:
    """Return the number of accumulators over which a product's depth is split.

    One chain of additions waits for itself. But the number depends neither on the rows nor, where blocks are added up,
    on whether a block is seen completely. So a token's attention is the same bit by bit, whichever tokens are computed
    with it.
    """
    return 2 if not accumulate and isinstance(depth, int) and depth % 2 == 0 else 1


def _emit_tile(
    builder: ir.IRBuilder,
    rows: int,
    depth: int | ir.Value,
    columns: int,
    accumulate: bool,
    a: Sequence[ir.Value],
    b: ir.Value,
    c: Sequence[ir.Value],
    coming: ir.Value | None = None,
) -> None:
    """Emit LLVM code for c[r, :] (+)= Σ_k a[r, k] · b[k, :] with all accumulators in registers.

    `a` and `c` are lists of pointers to rows of floats; `b` is a pointer to a contiguous [depth, columns] matrix of
    floats, or of bfloat16 or int8, which are widened in registers. `depth` may be known only at run time, as an LLVM
    value; it is split as `_split` says. Meanwhile fetch as many bytes from the pointer `coming` on as b has.

    Of a sum of bfloat16 rows, c has the even columns before the odd ones: `load_evens_and_odds`.
    """
    vector = ir.VectorType(FLOAT, columns)
    zero = ir.Constant(vector, [0.0] * columns)
    fma, index = multiply_add(builder, vector), INDEX
    split = _split(depth, accumulate)
    if isinstance(depth, int):
        depth = index(depth // split)
    targets = [builder.bitcast(pointer, vector.as_pointer()) for pointer in c]
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(split)] for _ in range(rows)]
    for r in range(rows):
        builder.store(builder.load(targets[r], align=4) if accumulate else zero, sums[r][0])
        for extra in sums[r][1:]:
            builder.store(zero, extra)
    load = load_evens_and_odds if accumulate and has_evens_and_odds(b, columns) else load_floats
    step = split * columns * item_bytes(b)
    with cgutils.for_range(builder, depth) as loop:
        if coming is not None:
            for line in range(0, step, _LINE):
                fetch(builder, builder.gep(coming, [builder.add(builder.mul(loop.index, index(step)), index(line))]))
        for n in range(split):
            k = builder.add(builder.mul(loop.index, index(split)), index(n))
            line = load(builder, builder.gep(b, [builder.mul(k, index(columns))]), columns)
            for r in range(rows):
                factor = splat(builder, vector, builder.load(builder.gep(a[r], [k])))
                builder.store(builder.call(fma, [factor, line, builder.load(sums[r][n])]), sums[r][n])
    for r in range(rows):
        total = builder.load(sums[r][0])
        for extra in sums[r][1:]:
            total = builder.fadd(total, builder.load(extra))
        builder.store(total, targets[r], align=4)


@intrinsic(prefer_literal=True)
def _tile_product(_, rows, depth, columns, accumulate, a, a_start, b, b_start, ahead, c, c_start):  # type: ignore[no-untyped-def]
    """Compute c[c_start + r·c_width + n] (+)= Σ_k a[a_start + r·a_width + k] · b[b_start + k·columns + n] in float32.

    `rows`, `depth`, `columns` and `accumulate` are compile-time constants. Starts count elements from the arrays'
    first; a and c are two-dimensional. Meanwhile fetch as many elements of b from `ahead` on.
    """
    sizes = (rows, depth, columns, accumulate)
    if not all(isinstance(size, types.IntegerLiteral) for size in sizes):
        return None
    tall, deep, wide, adds = (size.literal_value for size in sizes)
    signature = types.void(*sizes, a, a_start, b, b_start, ahead, c, c_start)

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        pointer = functools.partial(element_pointer, context, builder, sig, args)

        def row(base: ir.Value, place: int, r: int) -> ir.Value:
            return builder.gep(base, [builder.mul(columns[place], INDEX(r))])

        base_a, base_b, base_c = pointer(4), pointer(6), pointer(9)
        columns = {}
        for place in (4, 9):
            array = context.make_array(sig.args[place])(context, builder, args[place])
            columns[place] = builder.extract_value(array.shape, 1)
        coming = byte_pointer(context, builder, sig, args, 6, builder.mul(args[8], INDEX(item_bytes(base_b))))
        step = max(1, _REGISTERS // (wide * _split(deep, bool(adds))))
        for first in range(0, tall, step):
            some = range(first, min(tall, first + step))
            lines_a, lines_c = ([row(base, place, r) for r in some] for base, place in ((base_a, 4), (base_c, 9)))
            _emit_tile(builder, len(some), deep, wide, bool(adds), lines_a, base_b, lines_c, None if first else coming)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def _add_row_product(_, columns, a, a_start, depth, b, b_start, c, c_start):  # type: ignore[no-untyped-def]
    """Compute c[c_start + n] += Σ_k a[a_start + k] · b[b_start + k·columns + n] in float32, over `depth` values of k.

    Only `columns` is a compile-time constant.
    """
    if not isinstance(columns, types.IntegerLiteral):
        return None
    wide = columns.literal_value

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        pointer = functools.partial(element_pointer, context, builder, sig, args)

        _emit_tile(builder, 1, args[3], wide, True, [pointer(1)], pointer(4), [pointer(6)])
        return context.get_dummy_value()

    return types.void(columns, a, a_start, depth, b, b_start, c, c_start), codegen


@intrinsic
def _fetch(_, array, place):  # type: ignore[no-untyped-def]
    """Prefetch the cache line that holds an element of an array."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        pointer = element_pointer(context, builder, sig, args, 0)
        fetch(builder, builder.bitcast(pointer, ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(array, place), codegen


@njit(fastmath=True, error_model="numpy")
def _exponentials(scores, top):  # type: ignore[no-untyped-def]
    """Replace scores by their softmax; `top` is the greatest, and all are finite, which fast arithmetic assumes."""
    total = np.float32(0)
    for t in range(len(scores)):
        e = exp(scores[t] - top)
        scores[t] = e
        total += e
    scale = np.float32(1) / total
    for t in range(len(scores)):
        scores[t] *= scale


@njit(error_model="numpy")
def _softmax(scores):  # type: ignore[no-untyped-def]
    """Replace scores by their softmax; all become NaN if one is NaN, or the greatest is infinite."""
    top = greatest(scores)
    if np.isfinite(top):
        _exponentials(scores, top)
    else:
        scores[:] = np.float32(np.nan)


@njit(error_model="numpy")
def _add_bias(scores, bias, begin, place):  # type: ignore[no-untyped-def]
    """Add the position bias to the scores of the keys from `begin` on, by their distance from a query's place."""
    reach = len(bias) // 2
    for t in range(len(scores)):
        scores[t] += bias[min(max(begin + t - place, -reach), reach) + reach]


@njit(error_model="numpy")
def _scale_columns(scores, at, rows, scales, begin, ahead, columns):  # type: ignore[no-untyped-def]
    """Multiply the columns of `rows` rows of scores, from element `at` on, by scales; fetch later ones meanwhile.

    The scales are those from byte `begin` on of the cache, the later ones those from byte `ahead` on.
    """
    width = scores.shape[1]
    _fetch(scales, ahead // SCALE_BYTES)
    for r in range(rows):
        line = scores[at // width + r]
        for t in range(columns):
            line[at % width + t] *= scales[begin // SCALE_BYTES + t]


@njit
def _load_rows(x, heads, rows, used, group, q, first, head, scale):  # type: ignore[no-untyped-def]
    """Load a tile for each of `heads` KV heads from `head` on, times `scale`: `used` of its `rows` rows.

    They are the KV head's `group` query heads, token by token from `first` on. The other rows are zeros.
    """
    x[:] = 0
    for h in range(heads):
        for r in range(used):
            line = q[first + r // group, (head + h) * group + r % group]
            for d in range(x.shape[1]):
                x[h * rows + r, d] = widened(line[d]) * np.float32(scale)


@njit
def _store_rows(x, heads, rows, used, group, out, first, head, evens_first):  # type: ignore[no-untyped-def]
    """Store the rows of tiles where `_load_rows` has them from, in the output.

    `evens_first`: whether the even columns come before the odd ones.
    """
    half = x.shape[1] // 2
    for h in range(heads):
        for r in range(used):
            row, line = x[h * rows + r], out[first + r // group, (head + h) * group + r % group]
            if evens_first:
                for d in range(half):
                    line[2 * d] = rounded(row[d], out)
                    line[2 * d + 1] = rounded(row[half + d], out)
            else:
                for d in range(x.shape[1]):
                    line[d] = rounded(row[d], out)


@njit
def _floats(rows, columns):  # type: ignore[no-untyped-def]
    """Allocate a matrix of float32."""
    return np.empty((rows, columns), np.float32)


@njit
def _block_range(tile, contexts, starts, window, causal, block_size):  # type: ignore[no-untyped-def]
    """Return a tile's first block, the first key in it, and the end of the tile's blocks."""
    sequence, _, queries, context = tile
    skipped = max(starts[sequence], context - window if causal else 0) // block_size
    end = max(0 if causal else contexts[sequence], context + queries - 1)
    return skipped, skipped * block_size, -(-end // block_size)


@njit
def _visible_keys(unseen, ends, tile, group, contexts, starts, window, causal, begin):  # type: ignore[no-untyped-def]
    """Set each row's first visible key, and the end of its visible keys, counted from `begin`."""
    sequence, _, queries, context = tile
    for r in range(queries * group):
        end = context + r // group
        unseen[r] = max(starts[sequence], end - window if causal else 0) - begin
        ends[r] = (end if causal else max(contexts[sequence], end)) - begin


@njit
def _softmax_rows(scores, heads, rows, used, unseen, ends, bias, head, group, begin, context):  # type: ignore[no-untyped-def]
    """Turn scores into weights: add the bias of the KV heads from `head` on, and take the softmax of seen keys."""
    for h in range(heads):
        for r in range(used):
            line = scores[h * rows + r]
            if bias.shape[1]:
                of_head = bias[(head + h) * group + r % group]
                _add_bias(line[: ends[used - 1]], of_head, begin, context + r // group - 1)
            _softmax(line[unseen[r] : ends[r]])


@njit
def _chunk_places(chunk, table, blocks, heads, head, kv_heads, part):  # type: ignore[no-untyped-def]
    """Return a chunk's head, its first element in the cache, and that of the chunk to fetch meanwhile.

    A chunk of `part` elements is a block of one head; those of a block's `heads` heads follow each other.
    """
    block, h = chunk // heads, chunk % heads
    ahead = min(block + -(-_AHEAD // heads), blocks - 1)
    return h, (table[block] * kv_heads + head + h) * part, (table[ahead] * kv_heads + head + h) * part


@njit
def _width(contexts, block_size):  # type: ignore[no-untyped-def]
    """Return the number of keys in the blocks of the longest context."""
    longest = 0
    for context in contexts:
        longest = max(longest, context)
    return -(-longest // block_size) * block_size


@njit
def _tiles(offsets, contexts, tokens):  # type: ignore[no-untyped-def]
    """Return [tiles, 4]: sequence, first query, queries (at most `tokens`), and the context of the first query."""
    count = 0
    for s in range(len(contexts)):
        count += -(-(offsets[s + 1] - offsets[s]) // tokens)
    tiles = np.empty((count, 4), np.int64)
    tile = 0
    for s in range(len(contexts)):
        for first in range(offsets[s], offsets[s + 1], tokens):
            tiles[tile, 0] = s
            tiles[tile, 1] = first
            tiles[tile, 2] = min(tokens, offsets[s + 1] - first)
            tiles[tile, 3] = contexts[s] - (offsets[s + 1] - first) + 1
            tile += 1
    return tiles


@njit
def _bounds(tiles, heads, window, decode, shares):  # type: ignore[no-untyped-def]
    """Return the first item of each share, and the end of the last, int64 [shares + 1]. An item is a tile and a head.

    In decoding, heads are innermost: those of a block lie together in memory, and are read together. Shares have about
    as many keys. In a prompt, heads are outermost, as neighbouring tiles differ in cost.
    """
    items = heads * len(tiles)
    bounds = np.empty(shares + 1, np.int64)
    for share in range(shares + 1):
        bounds[share] = share * items // shares
    if decode:
        keys = np.maximum(1, np.minimum(tiles[:, 3], window))
        total, before, share = keys.sum(), 0, 1
        for tile in range(len(tiles)):
            while share < shares and share * total < (before + keys[tile]) * shares:
                bounds[share] = tile * heads + (share * total - before * shares) * heads // (keys[tile] * shares)
                share += 1
            before += keys[tile]
    return bounds


@njit
def _tile_and_heads(item, end, heads, tiles, decode):  # type: ignore[no-untyped-def]
    """Return an item's tile, its head, and how many of the tile's heads from it on come before the item `end`."""
    if decode:
        return item // heads, item % heads, min(heads - item % heads, end - item)
    return item % tiles, item // tiles, 1


_SIGNATURE = (
    "void(real[:, :, :], cached[:, :, :, ::1], cached[:, :, :, ::1], int32[:, :], int32[::1], int32[::1], int32[::1],"
    " float32[:, ::1], float64, int64, boolean, int64, real[:, :, ::1])"
)
"""Fixed, so that no layout of an argument compiles the kernel again during a run."""


@functools.cache
def kernel(group: int, head_size: int, block_size: int, decode: bool, quantised: bool = False) -> Kernel:
    """Compile the kernel for `group` query heads per KV head; `quantised`: over a cache of 8 bits (`kv_int8.py`).

    The kernel is attend(q, keys, values, tables, offsets, contexts, starts, bias, scale, window, causal, shares, out);
    see `attention.attention` for the arguments. The work is dealt to threads in `shares` parts. The kernel is compiled
    once for these sizes and kept on disk.
    """
    tokens = 1 if decode else max(1, _ROWS // group)
    rows = tokens * group
    size, evens_first = head_size * block_size, not quantised and head_size % 2 == 0
    part = size + SCALE_BYTES * block_size if quantised else size

    @njit_by_dtype(_SIGNATURE.replace("cached", "int8" if quantised else "real"))
    def attend(  # type: ignore[no-untyped-def]
        q, keys, values, tables, offsets, contexts, starts, bias, scale, window, causal, shares, out
    ):
        kv_heads, tiles = keys.shape[1], _tiles(offsets, contexts, tokens)
        if quantised:  # once: a view for every block takes a third of the time
            key_scales, value_scales = keys.reshape(-1).view(np.float32), values.reshape(-1).view(np.float32)
        bounds, width = _bounds(tiles, kv_heads, window, decode, shares), _width(contexts, block_size)
        for share in prange(shares):
            most = kv_heads if decode else 1  # heads of a tile; to allocate for each would take a sixth of decoding
            x, scores = _floats(most * rows, head_size), _floats(most * rows, width)
            unseen, ends = np.empty(rows, np.int64), np.empty(rows, np.int64)  # each row sees the keys between them
            item, end = bounds[share], bounds[share + 1]
            while item < end:
                tile, head, heads = _tile_and_heads(item, end, kv_heads, len(tiles), decode)
                item += heads
                sequence, first, queries, context = tiles[tile]
                table, used = tables[sequence], queries * group
                skipped, begin, blocks = _block_range(tiles[tile], contexts, starts, window, causal, block_size)
                _load_rows(x, heads, rows, used, group, q, first, head, scale)
                for chunk in range(skipped * heads, blocks * heads):
                    h, block, ahead = _chunk_places(chunk, table, blocks, heads, head, kv_heads, part)
                    at, to = h * rows * head_size, h * rows * width + chunk // heads * block_size - begin
                    _tile_product(rows, head_size, block_size, 0, x, at, keys, block, ahead, scores, to)
                    if quantised:
                        _scale_columns(scores, to, rows, key_scales, block + size, ahead + size, block_size)
                _visible_keys(unseen, ends, tiles[tile], group, contexts, starts, window, causal, begin)
                _softmax_rows(scores, heads, rows, used, unseen, ends, bias, head, group, begin, context)
                x[:] = 0
                for chunk in range(skipped * heads, blocks * heads):
                    h, block, ahead = _chunk_places(chunk, table, blocks, heads, head, kv_heads, part)
                    key = chunk // heads * block_size - begin
                    at, to = h * rows * width + key, h * rows * head_size
                    if quantised:
                        _scale_columns(scores, at, rows, value_scales, block + size, ahead + size, block_size)
                    if unseen[used - 1] <= key and key + block_size <= ends[0]:
                        _tile_product(rows, block_size, head_size, 1, scores, at, values, block, ahead, x, to)
                        continue
                    # Values that a row does not see may be NaN, even another sequence's, and NaN times zero is NaN.
                    for r in range(used):
                        skip = max(unseen[r] - key, 0)
                        seen, value = min(ends[r] - key, block_size) - skip, block + skip * head_size
                        weight = at + r * width + skip
                        _add_row_product(head_size, scores, weight, seen, values, value, x, to + r * head_size)
                _store_rows(x, heads, rows, used, group, out, first, head, evens_first and out.itemsize == 2)

    return attend
