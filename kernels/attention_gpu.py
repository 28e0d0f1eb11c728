"""Attention over a paged cache on a GPU, in Triton: the online softmax of FlashAttention-2.

A program has a tile of rows, which are tokens of one sequence times the query heads of one KV head, and goes through
the keys that they see, BLOCK_N at a time. `_attend_prefill` has a program for every tile of rows; `_attend_decode` has
a fixed number of programs, which go through the shares of a work list.

Where several programs share the keys of the same rows, each leaves a partial result, and the one that finishes last
merges them (flash-decoding, without a second launch). Nothing is read back to the host.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from exegpt.kernels.attention_tiles import Tile, choose_tile, head_dim, num_splits
from exegpt.kernels.device import architecture
from exegpt.kernels.gpu import operand
from exegpt.kernels.work_list import TILE, WorkList, most_slots


def programs_of_decoding(heads: int, values: torch.Tensor) -> int:
    """Programs for each KV head of a work list, for `heads` query heads over a cache: as many as run at a time."""
    kv_heads, head_size = values.shape[1], values.shape[3]
    gpu = architecture(values.device)
    tile = choose_tile(gpu, "decode", 1, heads // kv_heads, head_size, values.element_size(), biased=False)
    return max(1, gpu.multiprocessors * tile.resident // kv_heads)


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
    work: WorkList | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """`attention.attention` by Triton, with keys like values. Without a work list `splits` programs share the keys of
    the same rows; None: as many as FlashAttention's rule says.

    `keys` and `values` are contiguous, and so are the vectors of `q` and `out`.
    """
    if not len(q):
        return out
    gpu, phase = architecture(q.device), "decode" if len(q) == len(tables) else "prefill"
    group, kv_heads, new = q.shape[1] // values.shape[1], values.shape[1], len(q) // len(tables)
    tile = choose_tile(gpu, phase, new, group, q.shape[2], q.element_size(), bias is not None)
    window = window if causal else None
    block_q = 1 if phase == "decode" else tile.block_m // group  # tokens
    tiles = len(q) // block_q + (0 if phase == "decode" else len(tables))  # of rows, at most
    if work is None and splits is None:
        most_keys = tables.shape[1] * values.shape[2] if window is None else window + block_q
        splits = num_splits(tiles * kv_heads, gpu.multiprocessors * tile.resident, -(-most_keys // TILE))
    common = {
        "q": q,
        "k_cache": keys,
        "v_cache": values,
        "block_table": tables,
        "seq_lens": contexts,
        "starts": starts,
        "bias": bias,
        "out": out,
        **_sizes(q, values, tables, out, bias, tile),
        "sm_scale": (1 / math.sqrt(q.shape[2]) if scale is None else scale) * math.log2(math.e),
        "window": window or 0,
        "WINDOWED": window is not None,
    }
    if phase == "decode":
        _decode(common, work, splits)
    else:
        _prefill(common, offsets, tiles, block_q, splits, causal)
    return out


def _sizes(
    q: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
) -> dict[str, Any]:
    """The sizes that both kernels take."""
    return {
        "q_stride_token": q.stride(0),
        "q_stride_head": q.stride(1),
        "out_stride_token": out.stride(0),
        "out_stride_head": out.stride(1),
        "table_stride": tables.stride(0),
        "reach": 0 if bias is None else bias.shape[1] // 2,
        "GROUP": q.shape[1] // values.shape[1],
        "HEAD_SIZE": q.shape[2],
        "HEAD_DIM": head_dim(q.shape[2]),
        "BLOCK_SIZE": values.shape[2],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "DTYPE": operand(q.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _decode(common: dict[str, Any], work: WorkList | None, splits: int | None) -> None:
    """One new token of every sequence: by a work list, or by `splits` programs for each sequence and KV head."""
    q, kv_heads = common["q"], common["v_cache"].shape[1]
    if work is not None:
        programs, slots = len(work.first_items) - 1, most_slots(len(work.first_items) - 1)
        lists = work._asdict()
    else:
        assert splits is not None
        programs, slots = len(q) * splits, len(q) * splits if splits > 1 else 0
        lists = dict.fromkeys(WorkList._fields) | {"arrived": _zeros(len(q), kv_heads, slots, q.device)}
    partial_out, partial_lse = _partial_results(slots, q)
    _attend_decode[programs, kv_heads](
        **common,
        **lists,
        partial_out=partial_out,
        partial_lse=partial_lse,
        splits=splits or 0,
        LIST_TILE=TILE,
    )


def _prefill(
    common: dict[str, Any], cu_seqlens_q: torch.Tensor, tiles: int, block_q: int, splits: int | None, causal: bool
) -> None:
    """Any numbers of new tokens: in so many tiles of `block_q` tokens at most, by `splits` programs for each."""
    assert splits is not None, "a work list is decoding's"
    q, kv_heads, sequences = common["q"], common["v_cache"].shape[1], len(common["block_table"])
    slots = len(q) * splits if splits > 1 else 0
    partial_out, partial_lse = _partial_results(slots, q)
    _attend_prefill[tiles, kv_heads, splits](
        **common,
        cu_seqlens_q=cu_seqlens_q,
        arrived=_zeros(tiles, kv_heads, slots, q.device),
        partial_out=partial_out,
        partial_lse=partial_lse,
        tokens=len(q),
        sequences=sequences,
        BLOCK_Q=block_q,
        SEQUENCES=max(64, triton.next_power_of_2(sequences)),  # few kernels to compile
        CAUSAL=causal,
    )


def _partial_results(slots: int, q: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Room for partial results, [slots, heads, head_size], and the log-sum-exp of each, [slots, heads]; None for 0."""
    if not slots:
        return None, None
    there = {"dtype": torch.float32, "device": q.device}
    return torch.empty(slots, *q.shape[1:], **there), torch.empty(slots, q.shape[1], **there)


def _zeros(rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor | None:
    """Counts of the programs that have left a partial result; None where there are none."""
    return torch.zeros(rows, kv_heads, dtype=torch.int32, device=device) if slots else None


# Parts of one array of tables begin anywhere in it.
@triton.jit(
    do_not_specialize=["window", "splits", "table_stride", "reach"],
    do_not_specialize_on_alignment=["block_table"],
)
def _attend_decode(  # type: ignore[no-untyped-def]
    q,  # [sequences, heads, HEAD_SIZE]
    k_cache,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_SIZE]
    v_cache,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_SIZE]
    block_table,  # int32 [sequences, most blocks]
    seq_lens,  # int32 [sequences]
    starts,  # int32 [sequences], or None
    bias,  # float32 [heads, 2 * reach + 1], or None
    first_items,  # int32 [programs + 1], or None without a work list
    items,  # int32 [items, 4]: sequence, first tile, tiles, slot; or None
    first_slots,  # int32 [sequences + 1], or None
    arrived,  # int32 [sequences, kv_heads], zeros; None where nothing is split
    out,  # [sequences, heads, HEAD_SIZE]
    partial_out,  # float32 [slots, heads, HEAD_SIZE], or None
    partial_lse,  # float32 [slots, heads], or None
    sm_scale,  # times log2(e), as all scores are in powers of two
    window,  # tokens that are seen, where WINDOWED
    splits,  # programs for each sequence and KV head, without a work list
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    table_stride,
    reach,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # HEAD_SIZE filled up to a power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LIST_TILE: tl.constexpr,  # keys of a tile of the work list
    WINDOWED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One new token of every sequence: this program's items of the work list, for one KV head."""
    pid, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rows, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + rows % GROUP
    real = rows < GROUP
    size: tl.constexpr = BLOCK_SIZE * HEAD_SIZE

    first_item, end_item = pid, pid + 1
    if items is not None:
        first_item, end_item = tl.load(first_items + pid), tl.load(first_items + pid + 1)
    for item in range(first_item, end_item):
        sequence = tl.load(items + 4 * item) if items is not None else pid // splits
        seq_len = tl.load(seq_lens + sequence)
        start = 0
        if starts is not None:
            start = tl.load(starts + sequence)
        if WINDOWED:
            start = tl.maximum(start, seq_len - window)
        seen, seen_end = start // BLOCK_N, tl.cdiv(seq_len, BLOCK_N)  # tiles of keys
        if items is not None:
            list_begin = tl.load(items + 4 * item + 1)
            list_end = list_begin + tl.load(items + 4 * item + 2)
            begin = tl.maximum(seen, list_begin * (LIST_TILE // BLOCK_N))
            end = tl.minimum(seen_end, list_end * (LIST_TILE // BLOCK_N))
            first_slot = tl.load(first_slots + sequence)
            part = tl.load(items + 4 * item + 3) - first_slot
            parts = tl.load(first_slots + sequence + 1) - first_slot
        else:
            part, parts, first_slot = pid % splits, splits, sequence * splits
            begin = seen + (seen_end - seen) * part // splits
            end = seen + (seen_end - seen) * (part + 1) // splits

        token = sequence.to(tl.int64)
        q_at = q + token * q_stride_token + head * q_stride_head
        tile_q = tl.load(
            q_at[:, None] + offs_d[None, :], mask=real[:, None] & (offs_d < HEAD_SIZE)[None, :], other=0.0
        ).to(DTYPE)
        acc, l_i, m_i = _attend_tiles(
            acc=tl.zeros([BLOCK_M, HEAD_DIM], tl.float32),
            l_i=tl.zeros([BLOCK_M], tl.float32),
            m_i=tl.full([BLOCK_M], float("-inf"), tl.float32),
            q=tile_q,
            k_cache=k_cache + kv_head * size,
            v_cache=v_cache + kv_head * size,
            block_stride=kv_heads * size,
            block_table=block_table + token * table_stride,
            bias=bias,
            head=head,
            position=seq_len - 1 + tl.zeros([BLOCK_M], tl.int32),
            start=start,
            seen_end=seq_len,
            window=window,
            sm_scale=sm_scale,
            reach=reach,
            begin=begin,
            end=end,
            HEAD_SIZE=HEAD_SIZE,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            CAUSAL=False,  # nothing lies behind the token
            WINDOWED=False,  # it begins at `start`
            MASKED=True,
            DTYPE=DTYPE,
        )
        _store(
            acc=acc,
            l_i=l_i,
            m_i=m_i,
            real=real,
            out=out,
            out_row=token * out_stride_token + head * out_stride_head,
            partial_out=partial_out,
            partial_lse=partial_lse,
            partial_row=first_slot.to(tl.int64) * (kv_heads * GROUP) + head,
            part_stride=kv_heads * GROUP,
            part=part,
            parts=parts,
            arrived=arrived,
            arrived_at=sequence * kv_heads + kv_head,
            HEAD_SIZE=HEAD_SIZE,
        )


# `tokens` and `sequences` change with every batch.
@triton.jit(
    do_not_specialize=["window", "tokens", "sequences", "table_stride", "reach"],
    do_not_specialize_on_alignment=["block_table"],
)
def _attend_prefill(  # type: ignore[no-untyped-def]
    q,  # [tokens, heads, HEAD_SIZE]
    k_cache,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_SIZE]
    v_cache,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_SIZE]
    block_table,  # int32 [sequences, most blocks]
    cu_seqlens_q,  # int32 [sequences + 1]
    seq_lens,  # int32 [sequences]
    starts,  # int32 [sequences], or None
    bias,  # float32 [heads, 2 * reach + 1], or None
    arrived,  # int32 [tiles, kv_heads], zeros; None without splits
    out,  # [tokens, heads, HEAD_SIZE]
    partial_out,  # float32 [splits * tokens, heads, HEAD_SIZE], or None
    partial_lse,  # float32 [splits * tokens, heads], or None
    sm_scale,  # times log2(e), as all scores are in powers of two
    window,  # tokens that are seen, where WINDOWED
    tokens,
    sequences,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    table_stride,
    reach,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # HEAD_SIZE filled up to a power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # tokens of a tile
    BLOCK_N: tl.constexpr,
    SEQUENCES: tl.constexpr,  # a power of two, no fewer than there are
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One tile of queries over one split of the keys that they see, for one KV head."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    kv_heads, splits = tl.num_programs(1), tl.num_programs(2)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late ones see the most keys and go first
    sequence, first, last = _find_tile(cu_seqlens_q, sequences, tile, BLOCK_Q, SEQUENCES)
    if first >= last:
        return
    rows, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    token, head = first + rows // GROUP, kv_head * GROUP + rows % GROUP
    real = (rows < BLOCK_Q * GROUP) & (token < last)
    q_at = q + token.to(tl.int64) * q_stride_token + head * q_stride_head
    tile_q = tl.load(q_at[:, None] + offs_d[None, :], mask=real[:, None] & (offs_d < HEAD_SIZE)[None, :], other=0.0).to(
        DTYPE
    )

    seq_len = tl.load(seq_lens + sequence)
    shift = seq_len - tl.load(cu_seqlens_q + sequence + 1)  # from a token's place in the batch to its position
    position = shift + token
    first_position, last_position = shift + first, shift + tl.minimum(first + BLOCK_Q, last) - 1
    start = 0
    if starts is not None:
        start = tl.load(starts + sequence)
    # Tiles of keys: all that are seen, and of this split; those between `full` and `full_end` all rows see whole.
    seen, full, seen_end, full_end = start, start, seq_len, seq_len
    if WINDOWED:
        seen = tl.maximum(start, first_position - window + 1)
        full = tl.maximum(start, last_position - window + 1)
    if CAUSAL:
        seen_end, full_end = last_position + 1, first_position + 1
    all_tiles = tl.cdiv(seen_end, BLOCK_N) - seen // BLOCK_N
    begin = seen // BLOCK_N + all_tiles * split // splits
    end = seen // BLOCK_N + all_tiles * (split + 1) // splits
    full = tl.minimum(tl.maximum(begin, tl.cdiv(full, BLOCK_N)), end)
    full_end = tl.maximum(full, tl.minimum(full_end // BLOCK_N, end))

    size: tl.constexpr = BLOCK_SIZE * HEAD_SIZE
    table = block_table + sequence.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    bounds = (begin, full, full_end, end)
    for part in tl.static_range(3):  # what not all rows see yet, what all see whole, the diagonal
        if part > 0 or WINDOWED or starts is not None:
            acc, l_i, m_i = _attend_tiles(
                acc=acc,
                l_i=l_i,
                m_i=m_i,
                q=tile_q,
                k_cache=k_cache + kv_head * size,
                v_cache=v_cache + kv_head * size,
                block_stride=kv_heads * size,
                block_table=table,
                bias=bias,
                head=head,
                position=position,
                start=start,
                seen_end=seen_end,
                window=window,
                sm_scale=sm_scale,
                reach=reach,
                begin=bounds[part],
                end=bounds[part + 1],
                HEAD_SIZE=HEAD_SIZE,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_N=BLOCK_N,
                CAUSAL=CAUSAL,
                WINDOWED=WINDOWED,
                MASKED=part != 1,
                DTYPE=DTYPE,
            )
    _store(
        acc=acc,
        l_i=l_i,
        m_i=m_i,
        real=real,
        out=out,
        out_row=token.to(tl.int64) * out_stride_token + head * out_stride_head,
        partial_out=partial_out,
        partial_lse=partial_lse,
        partial_row=token.to(tl.int64) * (kv_heads * GROUP) + head,
        part_stride=tokens * (kv_heads * GROUP),
        part=split,
        parts=splits,
        arrived=arrived,
        arrived_at=tile * kv_heads + kv_head,
        HEAD_SIZE=HEAD_SIZE,
    )


@triton.jit
def _find_tile(  # type: ignore[no-untyped-def]
    cu_seqlens_q,  # int32 [sequences + 1]
    sequences,
    tile,
    BLOCK_Q: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """The sequence of a tile of queries, the tile's first token, and where the sequence's new tokens end: no later than
    that where there is no such tile. Sequence i has tiles from cu_seqlens_q[i] // BLOCK_Q + i on.
    """
    offs = tl.arange(0, SEQUENCES)
    begins = tl.load(cu_seqlens_q + offs, mask=offs < sequences, other=1 << 30)  # sums stay below 2^31
    sequence = tl.sum((begins // BLOCK_Q + offs <= tile).to(tl.int32)) - 1
    begin = tl.load(cu_seqlens_q + sequence)
    first = begin + (tile - begin // BLOCK_Q - sequence) * BLOCK_Q
    return sequence, first, tl.load(cu_seqlens_q + sequence + 1)


@triton.jit
def _attend_tiles(  # type: ignore[no-untyped-def]
    acc,  # float32 [BLOCK_M, HEAD_DIM]: weighted values so far
    l_i,  # float32 [BLOCK_M]: sum of exponentials so far
    m_i,  # float32 [BLOCK_M]: greatest score so far
    q,  # [BLOCK_M, HEAD_DIM]
    k_cache,  # one KV head's [BLOCK_SIZE, HEAD_SIZE] of each block, `block_stride` apart
    v_cache,  # as k_cache
    block_stride,
    block_table,  # int32 [most blocks]: this sequence's
    bias,  # float32 [heads, 2 * reach + 1], or None
    head,  # int32 [BLOCK_M]
    position,  # int32 [BLOCK_M]: of the queries
    start,  # the first key that is seen
    seen_end,  # the first one behind it that is not
    window,
    sm_scale,
    reach,
    begin,  # tiles of keys
    end,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,  # whether some rows don't see all keys
    DTYPE: tl.constexpr,
):
    """Online softmax over the tiles `begin` to `end` of keys."""
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, q.shape[1])
    in_head = (offs_d < HEAD_SIZE)[None, :]
    blocks = tl.cdiv(seen_end, BLOCK_SIZE)
    # The numbers of a tile's blocks are loaded one iteration ahead and carried by the loop: if K and V hung on a load
    # of their own iteration, Triton would spend its stages on that one, and keep a single buffer of K and V.
    place = begin * BLOCK_N + offs_n
    block = tl.load(block_table + place // BLOCK_SIZE, mask=place // BLOCK_SIZE < blocks, other=0)
    for tile in range(begin, end):
        key = tile * BLOCK_N + offs_n
        row = block.to(tl.int64) * block_stride + key % BLOCK_SIZE * HEAD_SIZE
        place = (tile + 1) * BLOCK_N + offs_n
        block = tl.load(block_table + place // BLOCK_SIZE, mask=place // BLOCK_SIZE < blocks, other=0)

        # K needs no mask along the keys, scores have one; V does: what lies behind the last token might be no number.
        k_at, v_at = k_cache + row[:, None] + offs_d[None, :], v_cache + row[:, None] + offs_d[None, :]
        k = (tl.load(k_at) if q.shape[1] == HEAD_SIZE else tl.load(k_at, mask=in_head, other=0.0)).to(DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
        distance = key[None, :] - position[:, None]
        if bias is not None:
            near = tl.minimum(tl.maximum(distance, -reach), reach) + reach
            scores += tl.load(bias + head[:, None] * (2 * reach + 1) + near) * 1.4426950408889634
        if MASKED:
            seen = ((key >= start) & (key < seen_end))[None, :]
            if CAUSAL:
                seen &= distance <= 0
            if WINDOWED:
                seen &= distance > -window
            scores = tl.where(seen, scores, float("-inf"))

        m_new = tl.maximum(m_i, tl.max(scores, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(scores - base[:, None])
        alpha = tl.exp2(m_i - base)
        l_i = l_i * alpha + tl.sum(p, 1)
        if MASKED:
            v = tl.load(v_at, mask=(key < seen_end)[:, None] & in_head, other=0.0).to(DTYPE)
        elif q.shape[1] == HEAD_SIZE:
            v = tl.load(v_at).to(DTYPE)
        else:
            v = tl.load(v_at, mask=in_head, other=0.0).to(DTYPE)
        acc = tl.dot(p.to(DTYPE), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    acc,  # float32 [BLOCK_M, HEAD_DIM]
    l_i,  # float32 [BLOCK_M]
    m_i,  # float32 [BLOCK_M]
    real,  # bool [BLOCK_M]: rows that do not only fill up
    out,
    out_row,  # int64 [BLOCK_M]: where each row of the result begins
    partial_out,  # float32 [.., HEAD_SIZE], or None where nothing is split
    partial_lse,  # float32 [..], or None
    partial_row,  # int64 [BLOCK_M]: each row of the first part
    part_stride,  # rows from one part to the next
    part,  # this program's
    parts,  # of these rows' keys; fewer than two: the result is whole
    arrived,  # int32, zeros
    arrived_at,
    HEAD_SIZE: tl.constexpr,
):
    """Store the result; or a partial one, and where it is the last of its rows, what comes of all."""
    offs_d = tl.arange(0, acc.shape[1])
    kept = real[:, None] & (offs_d < HEAD_SIZE)[None, :]
    l_i = tl.where(l_i > 0, l_i, 1.0)  # of rows that see nothing here: what they get is 0, with a weight of 2^-inf
    acc = acc / l_i[:, None]
    out_at = out + out_row[:, None] + offs_d[None, :]
    if partial_out is None:
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=kept)
    else:
        if parts < 2:
            tl.store(out_at, acc.to(out.dtype.element_ty), mask=kept)
        else:
            row = partial_row + part * part_stride
            tl.store(partial_out + row[:, None] * HEAD_SIZE + offs_d[None, :], acc, mask=kept)
            tl.store(partial_lse + row, m_i + tl.log2(l_i), mask=real)
            # All threads' stores, then the count, which releases them and acquires those of the programs before.
            tl.debug_barrier()
            if tl.atomic_add(arrived + arrived_at, 1, sem="acq_rel") == parts - 1:
                tl.store(arrived + arrived_at, 0)
                acc = _merged(partial_out, partial_lse, partial_row, part_stride, parts, real, kept, HEAD_SIZE)
                tl.store(out_at, acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _merged(  # type: ignore[no-untyped-def]
    partial_out,  # float32 [.., HEAD_SIZE]
    partial_lse,  # float32 [..]
    partial_row,  # int64 [BLOCK_M]: each row of the first part
    part_stride,
    parts,
    real,  # bool [BLOCK_M]
    kept,  # bool [BLOCK_M, HEAD_DIM]
    HEAD_SIZE: tl.constexpr,
):
    """All parts' results, each weighted by its share of the sum of exponentials: float32 [BLOCK_M, HEAD_DIM].

    The order is the parts', whoever came last: the result is the same in every run.
    """
    offs_d = tl.arange(0, kept.shape[1])
    acc = tl.zeros(kept.shape, tl.float32)
    l_i = tl.zeros(real.shape, tl.float32)
    m_i = tl.full(real.shape, float("-inf"), tl.float32)
    for part in range(parts):
        row = partial_row + part * part_stride
        # From the second cache: other programs wrote it.
        lse = tl.load(partial_lse + row, mask=real, other=0.0, cache_modifier=".cg")
        value = tl.load(
            partial_out + row[:, None] * HEAD_SIZE + offs_d[None, :], mask=kept, other=0.0, cache_modifier=".cg"
        )
        m_new = tl.maximum(m_i, lse)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, weight = tl.exp2(m_i - base), tl.exp2(lse - base)
        l_i = l_i * alpha + weight
        acc = acc * alpha[:, None] + value * weight[:, None]
        m_i = m_new
    return acc / l_i[:, None]
