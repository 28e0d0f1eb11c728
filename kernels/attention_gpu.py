"""Attention over a paged cache on a GPU: one Triton kernel for whole prompts, pieces of prompts and decoding.

A program takes a tile of one sequence's queries, all query heads of one KV head side by side, and goes through the
keys that they see with the online softmax of FlashAttention-2. Where there are too few tiles to fill the device, the
keys are dealt to several programs and `_combine` merges what they found (flash-decoding). Nothing is read back to the
host: how many tiles there are at most follows from shapes, and a program finds its sequence itself.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from exegpt.kernels.gpu import multiprocessors, operand, shared_memory

_LOG2_E = math.log2(math.e)
_RESIDENT, _RESIDENT_LARGE = 4, 1
"""Programs that a multiprocessor runs at a time: with small tiles of queries, and with those of 64 rows and more."""
_LEAST_KEYS = 512
"""Keys that one split has at least: fewer cost more in combining than they gain."""


@dataclass(frozen=True)
class Tile:
    """How the work is cut; see `choose_tile`."""

    rows: int
    """Rows of a tile of scores: `queries` tokens times the query heads of a KV head, and rows that only fill up."""
    queries: int
    keys: int
    """Columns: keys that are read together."""
    warps: int
    stages: int
    """Tiles of keys that are read ahead."""


def padded(head_size: int) -> int:
    """Columns that a tile has for a head: a power of two, and no fewer than matrix units take."""
    return max(16, triton.next_power_of_2(head_size))


def choose_tile(
    tokens: int, sequences: int, group: int, head_size: int, itemsize: int, biased: bool, shared: int
) -> Tile:
    """The tile for so many new tokens of so many sequences, `group` query heads per KV head, elements of `itemsize`
    bytes, with or without a position bias (whose addresses take registers), and `shared` bytes of shared memory."""
    width = padded(head_size)
    decode = tokens == sequences
    if itemsize == 2:
        most, keys = 128, 64 if width <= 128 and not biased else 32
    else:  # no matrix units: both tiles are in registers
        most, keys = (32, 32) if width <= 64 else (16, 16)
    two_stages = 4 * keys * width * itemsize
    if most * width * itemsize + two_stages > shared:
        most //= 2
    wanted = min(most, triton.next_power_of_2(group * (tokens // sequences)))
    rows = max(16, triton.next_power_of_2(group), wanted)
    stages = 3 if rows * width * itemsize + two_stages * 3 // 2 <= shared else 2
    return Tile(rows, 1 if decode else rows // group, keys, 8 if rows * width >= 128 * 128 else 4, stages)


def choose_splits(programs: int, most_keys: int, tile: Tile, processors: int) -> tuple[int, int]:
    """(splits, tiles of keys in each) for `programs` tiles of queries that see `most_keys` keys at most: so many that
    they fill the device's `processors`."""
    room = processors * (_RESIDENT if tile.rows < 64 else _RESIDENT_LARGE)
    wanted = min(-(-room // programs), -(-most_keys // _LEAST_KEYS))
    tiles = -(-most_keys // tile.keys)
    each = -(-tiles // wanted)
    return -(-tiles // each), each


@dataclass(frozen=True)
class Launch:
    """How the programs of one call are dealt; see `plan`."""

    tile: Tile
    decode: bool
    """Whether every sequence has one new token, so that a program's tile tells its sequence."""
    window: int | None
    tiles: int
    """Of queries, at most."""
    splits: int
    each: int
    """Tiles of keys of a split."""


def plan(
    q: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, window: int | None, biased: bool, splits: int | None
) -> Launch:
    """The launch for these arguments of `attention_gpu`."""
    (tokens, heads, head_size), (sequences, blocks) = q.shape, tables.shape
    kv_heads, block_size = values.shape[1:3]
    shared = shared_memory(q.device)
    tile = choose_tile(tokens, sequences, heads // kv_heads, head_size, q.element_size(), biased, shared)
    decode = tokens == sequences
    tiles = tokens if decode else tokens // tile.queries + sequences
    most_keys = blocks * block_size
    if window is not None:
        most_keys = min(most_keys, window + tile.queries + tile.keys)
    if splits is None:
        splits, each = choose_splits(tiles * kv_heads, most_keys, tile, multiprocessors(q.device))
    else:
        each = -(-most_keys // (tile.keys * splits))
    return Launch(tile, decode, window, tiles, splits, each)


def attention_gpu(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    offsets: torch.Tensor,
    contexts: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    starts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """`attention.attention` by Triton; `splits` deals each tile's keys to so many programs, None to what fills the GPU.

    `keys` and `values` are contiguous, and so are the vectors of `q` and `out`.
    """
    if not len(q):
        return out
    (tokens, heads, head_size), (_, kv_heads, block_size, _) = q.shape, values.shape
    launch = plan(q, values, tables, window if causal else None, bias is not None, splits)
    tile, parts, sums = launch.tile, out, None
    if launch.splits > 1:
        parts = torch.empty(launch.splits, tokens, heads, head_size, dtype=torch.float32, device=q.device)
        sums = torch.empty(launch.splits, tokens, heads, dtype=torch.float32, device=q.device)
    scale = (1 / math.sqrt(head_size) if scale is None else scale) * _LOG2_E
    reach = 0 if bias is None else bias.shape[1] // 2
    strides = q.stride(0), q.stride(1), parts.stride(-3), parts.stride(-2), tables.stride(0)
    sequences = len(tables)
    _attend[launch.tiles, kv_heads, launch.splits](
        q, keys, values, tables, offsets, contexts, starts, bias, parts, sums,
        scale, launch.window or 0, sequences, launch.each, *strides, reach,
        GROUP=heads // kv_heads, HEAD_SIZE=head_size, WIDTH=padded(head_size), BLOCK_SIZE=block_size,
        ROWS=tile.rows, QUERIES=tile.queries, KEYS=tile.keys,
        SEQUENCES=1 if launch.decode else max(64, triton.next_power_of_2(sequences)),  # few kernels to compile
        DECODE=launch.decode, CAUSAL=causal, WINDOWED=launch.window is not None, SPLIT=sums is not None,
        DTYPE=operand(q.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if sums is not None:
        _combine[tokens, heads](
            parts, sums, out, launch.splits, out.stride(0), out.stride(1),
            HEAD_SIZE=head_size, WIDTH=padded(head_size), SPLITS=triton.next_power_of_2(launch.splits),
            STEP=min(32, triton.next_power_of_2(launch.splits)), num_warps=4,
        )  # fmt: skip
    return out


# Parts of one array of tables begin anywhere in it.
@triton.jit(
    do_not_specialize=["window", "sequences", "each", "table_stride", "reach"],
    do_not_specialize_on_alignment=["tables"],
)
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, tables, offsets, contexts, starts, bias, out, sums,
    scale, window, sequences, each, q_token, q_head, out_token, out_head, table_stride, reach,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SEQUENCES: tl.constexpr,
    DECODE: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile of queries over one split of its keys. `scale` and all scores are in powers of two.

    Without splits `out` is the result; with them it is float32 [splits, tokens, heads, head_size], and `sums` takes the
    base-2 logarithm of each row's sum, -inf where the split had no keys.
    """
    kv_head, split, kv_heads = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    sequence, first, end = _find(offsets, sequences, QUERIES, SEQUENCES, DECODE)
    if first >= end:
        return
    rows = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    token = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    real = (rows < QUERIES * GROUP) & (token < end)
    kept = real[:, None] & (d < HEAD_SIZE)[None, :]
    q_at = token.to(tl.int64) * q_token + head * q_head
    tile_q = tl.load(q + q_at[:, None] + d[None, :], mask=kept, other=0.0).to(DTYPE)

    context = tl.load(contexts + sequence)
    place = context - end + token
    first_place, last_place = context - end + first, context - end + tl.minimum(first + QUERIES, end) - 1
    start = 0
    if starts is not None:
        start = tl.load(starts + sequence)
    high, from_tile, body, tail, to_tile = _seen_tiles(
        first_place, last_place, context, start, window, split, each, KEYS, CAUSAL, WINDOWED
    )

    size = HEAD_SIZE * BLOCK_SIZE
    cache = (keys + kv_head * size, values + kv_head * size, tables + sequence.to(tl.int64) * table_stride)
    sum_of = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if DECODE:  # limited by memory, where a mask costs nothing and beginning a second loop does
        tail = from_tile
    else:
        if WINDOWED or starts is not None:
            sum_of, top, total = _see(
                sum_of, top, total, tile_q, cache, kv_heads * size, bias, head, place, start, window, high, scale,
                reach, from_tile, body, HEAD_SIZE, WIDTH, BLOCK_SIZE, KEYS, CAUSAL, WINDOWED, True, DTYPE,
            )  # fmt: skip
        sum_of, top, total = _see(
            sum_of, top, total, tile_q, cache, kv_heads * size, bias, head, place, start, window, high, scale,
            reach, body, tail, HEAD_SIZE, WIDTH, BLOCK_SIZE, KEYS, CAUSAL, WINDOWED, False, DTYPE,
        )  # fmt: skip
    sum_of, top, total = _see(
        sum_of, top, total, tile_q, cache, kv_heads * size, bias, head, place, start, window, high, scale,
        reach, tail, to_tile, HEAD_SIZE, WIDTH, BLOCK_SIZE, KEYS, CAUSAL, WINDOWED, True, DTYPE,
    )  # fmt: skip

    total = tl.where(total > 0, total, 1.0)  # no keys: zeros, weighted with 2 to the -inf
    out_at = token.to(tl.int64) * out_token + head * out_head
    if SPLIT:
        tokens = tl.load(offsets + sequences).to(tl.int64)
        out_at += split * tokens * out_token
        sum_at = (split * tokens + token) * (kv_heads * GROUP) + head
        tl.store(sums + sum_at, top + tl.log2(total), mask=real)
    tl.store(out + out_at[:, None] + d[None, :], (sum_of / total[:, None]).to(out.dtype.element_ty), mask=kept)


@triton.jit
def _find(  # type: ignore[no-untyped-def]
    offsets, sequences, QUERIES: tl.constexpr, SEQUENCES: tl.constexpr, DECODE: tl.constexpr
):
    """This program's sequence, the first token of its tile, and where the sequence's new tokens end: no later than that
    where there is no tile for this program.
    """
    tile = tl.program_id(0)
    if DECODE:
        sequence = tile
        first = tile
        end = tile + 1
    else:  # sequence i has tiles from offsets[i] // QUERIES + i on; late ones see the most keys and go first
        tile = tl.num_programs(0) - 1 - tile
        every = tl.arange(0, SEQUENCES)
        begins = tl.load(offsets + every, mask=every < sequences, other=1 << 30)  # sums stay below 2^31
        sequence = tl.sum((begins // QUERIES + every <= tile).to(tl.int32)) - 1
        begin = tl.load(offsets + sequence)
        first = begin + (tile - begin // QUERIES - sequence) * QUERIES
        end = tl.load(offsets + sequence + 1)
    return sequence, first, end


@triton.jit
def _seen_tiles(  # type: ignore[no-untyped-def]
    first_place, last_place, context, start, window, split, each,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """What queries from `first_place` to `last_place` see of this split: the first key that none of them does; then the
    first tile of keys, the two between which all see all keys, and the end.
    """
    low, all_from = start, start
    high, all_to = context, context
    if WINDOWED:
        low = tl.maximum(low, first_place - window + 1)
        all_from = tl.maximum(all_from, last_place - window + 1)
    if CAUSAL:
        high = last_place + 1
        all_to = first_place + 1
    from_tile = low // KEYS + split * each
    to_tile = tl.minimum(tl.cdiv(high, KEYS), from_tile + each)
    body = tl.minimum(tl.maximum(from_tile, tl.cdiv(all_from, KEYS)), to_tile)
    tail = tl.maximum(body, tl.minimum(all_to // KEYS, to_tile))
    return high, from_tile, body, tail, to_tile


@triton.jit
def _see(  # type: ignore[no-untyped-def]
    sum_of, top, total, tile_q, cache, block_stride, bias, head, place, start, window, high, scale, reach,
    from_tile, to_tile, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Online softmax over some tiles of keys, which without MASKED all rows see whole.

    `top` and `total` are each row's greatest score and sum so far, `sum_of` the weighted values.
    """
    for tile in range(from_tile, to_tile):
        key = tile * KEYS + tl.arange(0, KEYS)
        k, v = _read(cache, block_stride, key, high, HEAD_SIZE, WIDTH, BLOCK_SIZE, MASKED, DTYPE)
        scores = tl.dot(tile_q, k, input_precision="ieee") * scale
        distance = key[None, :] - place[:, None]
        if bias is not None:
            near = tl.minimum(tl.maximum(distance, -reach), reach) + reach
            scores += tl.load(bias + head[:, None] * (2 * reach + 1) + near) * 1.4426950408889634
        if MASKED:
            seen = ((key >= start) & (key < high))[None, :]
            if CAUSAL:
                seen &= distance <= 0
            if WINDOWED:
                seen &= distance > -window
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        sum_of = tl.dot(weights.to(DTYPE), v, sum_of * shrink[:, None], input_precision="ieee")
        top = new_top
    return sum_of, top, total


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    cache, block_stride, key, high, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of keys [WIDTH, KEYS], whose last ones may be anything, and one of values [KEYS, WIDTH], zero from `high`
    on. `cache` is a KV head's keys, its values, and the sequence's table.
    """
    keys, values, table = cache
    d = tl.arange(0, WIDTH)
    if MASKED:  # by the block, so that Triton knows the keys of one to be neighbours
        block = tl.load(table + key // BLOCK_SIZE, mask=key // BLOCK_SIZE < tl.cdiv(high, BLOCK_SIZE), other=0)
    else:
        block = tl.load(table + key // BLOCK_SIZE)
    at = block.to(tl.int64) * block_stride
    k_at = keys + (at + key % BLOCK_SIZE)[None, :] + (d * BLOCK_SIZE)[:, None]
    v_at = values + (at + key % BLOCK_SIZE * HEAD_SIZE)[:, None] + d[None, :]
    # K needs no mask along the keys, scores do; V does: what lies behind the last token might be no number.
    if HEAD_SIZE != WIDTH:
        k = tl.load(k_at, mask=(d < HEAD_SIZE)[:, None], other=0.0).to(DTYPE)
    else:
        k = tl.load(k_at).to(DTYPE)
    if MASKED:
        v = tl.load(v_at, mask=(key < high)[:, None] & (d < HEAD_SIZE)[None, :], other=0.0).to(DTYPE)
    elif HEAD_SIZE != WIDTH:
        v = tl.load(v_at, mask=(d < HEAD_SIZE)[None, :], other=0.0).to(DTYPE)
    else:
        v = tl.load(v_at).to(DTYPE)
    return k, v


@triton.jit(do_not_specialize=["splits"])
def _combine(  # type: ignore[no-untyped-def]
    parts,
    sums,
    out,
    splits,
    out_token,
    out_head,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One head of one token: the splits' results, each weighted by its share of the sum of exponentials."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    row, stride = token * heads + head, tl.num_programs(0) * heads
    d = tl.arange(0, WIDTH)
    split = tl.arange(0, SPLITS)
    top = tl.max(tl.load(sums + row + split * stride, mask=split < splits, other=float("-inf")), 0)
    total = tl.zeros([STEP], tl.float32)
    result = tl.zeros([WIDTH], tl.float32)
    for first in range(0, splits, STEP):
        split = first + tl.arange(0, STEP)
        at = row + split * stride
        weight = tl.exp2(tl.load(sums + at, mask=split < splits, other=float("-inf")) - top)
        read = (weight > 0)[:, None] & (d < HEAD_SIZE)[None, :]  # nothing of splits without keys
        part = tl.load(parts + at[:, None] * HEAD_SIZE + d[None, :], mask=read, other=0.0)
        total += weight
        result += tl.sum(weight[:, None] * part, 0)
    result = result / tl.sum(total, 0)
    tl.store(out + token * out_token + head * out_head + d, result.to(out.dtype.element_ty), mask=d < HEAD_SIZE)
