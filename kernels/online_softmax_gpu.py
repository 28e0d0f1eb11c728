"""The common part of the attention kernels: the online softmax over tiles of keys, and results of several programs.

If several programs share the keys of the same rows, each leaves a partial result. The program that finishes last merges
them (flash-decoding, without a second launch).
"""

import torch
import triton
import triton.language as tl


def partial_results(slots: int, q: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Allocate partial results and their log-sum-exp; both are None for 0 slots.

    They are float32 [slots, heads, head_size] and [slots, heads].
    """
    if not slots:
        return {"partial_out": None, "partial_lse": None}
    return {
        "partial_out": torch.empty(slots, *q.shape[1:], dtype=torch.float32, device=q.device),
        "partial_lse": torch.empty(slots, q.shape[1], dtype=torch.float32, device=q.device),
    }


@triton.jit
def load_q(
    q,  # [tokens, heads, HEAD_SIZE]
    token,  # [BLOCK_M], or one for all rows
    head,  # [BLOCK_M]
    real,  # bool [BLOCK_M]: rows that aren't padding
    q_stride_token,
    q_stride_head,
    HEAD_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load the queries of a tile of rows: [BLOCK_M, HEAD_DIM]."""
    offs_d = tl.arange(0, HEAD_DIM)
    row = token.to(tl.int64) * q_stride_token + head * q_stride_head
    mask = real[:, None] & (offs_d < HEAD_SIZE)[None, :]
    return tl.load(q + row[:, None] + offs_d[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit
def attend_tiles(
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
    seen_end,  # the first later key that is not seen
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
    """Compute the online softmax over the tiles `begin` to `end` of keys."""
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, q.shape[1])
    in_head = (offs_d < HEAD_SIZE)[None, :]
    blocks = tl.cdiv(seen_end, BLOCK_SIZE)
    # The numbers of a tile's blocks are loaded one iteration ahead and carried by the loop. If K and V depended on a
    # load of their own iteration, Triton would spend its stages on that load, and keep a single buffer of K and V.
    place = begin * BLOCK_N + offs_n
    block = tl.load(block_table + place // BLOCK_SIZE, mask=place // BLOCK_SIZE < blocks, other=0)
    for tile in range(begin, end):
        key = tile * BLOCK_N + offs_n
        row = block.to(tl.int64) * block_stride + key % BLOCK_SIZE * HEAD_SIZE
        place = (tile + 1) * BLOCK_N + offs_n
        block = tl.load(block_table + place // BLOCK_SIZE, mask=place // BLOCK_SIZE < blocks, other=0)

        # K needs no mask along the keys: scores have one. V needs one: values outside the sequence may be NaN, which
        # times a weight of zero is NaN. Values that only some rows see are finite: see `kv_write`.
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
            v = tl.load(v_at, mask=((key >= start) & (key < seen_end))[:, None] & in_head, other=0.0).to(DTYPE)
        elif q.shape[1] == HEAD_SIZE:
            v = tl.load(v_at).to(DTYPE)
        else:
            v = tl.load(v_at, mask=in_head, other=0.0).to(DTYPE)
        acc = tl.dot(p.to(DTYPE), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def store_result(
    acc,  # float32 [BLOCK_M, HEAD_DIM]
    l_i,  # float32 [BLOCK_M]
    m_i,  # float32 [BLOCK_M]
    real,  # bool [BLOCK_M]: rows that aren't padding
    out,
    out_row,  # int64 [BLOCK_M]: where each row of the result begins
    partial_out,  # float32 [.., HEAD_SIZE], or None where nothing is split
    partial_lse,  # float32 [..], or None
    partial_row,  # int64 [BLOCK_M]: each row of the first part
    part_stride,  # rows from one part to the next
    part,  # index of this program's part
    parts,  # number of parts of these rows' keys; fewer than two: the result is whole
    arrived,  # int32, zeros
    arrived_at,
    HEAD_SIZE: tl.constexpr,
):
    """Store the result, or a partial result; the program that finishes last stores the merged result."""
    offs_d = tl.arange(0, acc.shape[1])
    kept = real[:, None] & (offs_d < HEAD_SIZE)[None, :]
    l_i = tl.where(l_i > 0, l_i, 1.0)  # rows that see nothing here get 0, with a weight of 2^-inf
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
            # All threads' stores come first. The count then releases them and acquires those of earlier programs.
            tl.debug_barrier()
            if tl.atomic_add(arrived + arrived_at, 1, sem="acq_rel") == parts - 1:
                tl.store(arrived + arrived_at, 0)
                acc = _merged(partial_out, partial_lse, partial_row, part_stride, parts, real, kept, HEAD_SIZE)
                tl.store(out_at, acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _merged(
    partial_out,  # float32 [.., HEAD_SIZE]
    partial_lse,  # float32 [..]
    partial_row,  # int64 [BLOCK_M]: each row of the first part
    part_stride,
    parts,
    real,  # bool [BLOCK_M]
    kept,  # bool [BLOCK_M, HEAD_DIM]
    HEAD_SIZE: tl.constexpr,
):
    """Merge all parts' results, each weighted by its share of the sum of exponentials: float32 [BLOCK_M, HEAD_DIM].

    Parts are merged in their own order, not in the order of completion, so the result is the same in every run.
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
