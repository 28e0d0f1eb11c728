"""Prefill's attention on a GPU: any number of new tokens, by a program for every tile of them."""

import torch
import triton
import triton.language as tl

from exegpt.kernels.online_softmax_gpu import attend_tiles, load_q, partial_results, store_result

LEAST_KEYS = 512
"""Keys of a split at least: fewer are read sooner than partial results are merged. In a graph, splits are for the
longest contexts that there may be."""


def attend_prefill(
    common: dict[str, object],
    q: torch.Tensor,
    kv_heads: int,
    cu_seqlens_q: torch.Tensor,
    tiles: int,
    block_q: int,
    splits: int,
    causal: bool,
) -> None:
    """Launch the kernel with the arguments that `attention_gpu` gives both kernels.

    The kernel computes `tiles` tiles of at most `block_q` tokens, by `splits` programs for each.
    """
    sequences = len(cu_seqlens_q) - 1
    slots = len(q) * splits if splits > 1 else 0
    _attend_prefill[tiles, kv_heads, splits](
        **common,
        **partial_results(slots, q),
        cu_seqlens_q=cu_seqlens_q,
        arrived=torch.zeros(tiles, kv_heads, dtype=torch.int32, device=q.device) if slots else None,
        tokens=len(q),
        sequences=sequences,
        least_keys=LEAST_KEYS,
        BLOCK_Q=block_q,
        SEQUENCES=max(64, triton.next_power_of_2(sequences)),  # few kernels to compile
        CAUSAL=causal,
    )


# `tokens` and `sequences` change with every batch.
@triton.jit(
    do_not_specialize=["window", "tokens", "sequences", "least_keys", "table_stride", "reach"],
    do_not_specialize_on_alignment=["block_table"],
)
def _attend_prefill(
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
    window,  # tokens that are seen, if WINDOWED
    tokens,
    sequences,
    least_keys,  # keys that are worth a split
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    table_stride,
    reach,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # HEAD_SIZE padded to a power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # tokens of a tile
    BLOCK_N: tl.constexpr,
    SEQUENCES: tl.constexpr,  # a power of two, at least `sequences`
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute one tile of queries over one split of the keys that they see, for one KV head."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    kv_heads, splits = tl.num_programs(1), tl.num_programs(2)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles see the most keys and go first
    sequence, first, last = _find_tile(cu_seqlens_q, sequences, tile, BLOCK_Q, SEQUENCES)
    if first >= last:
        return
    rows = tl.arange(0, BLOCK_M)
    token, head = first + rows // GROUP, kv_head * GROUP + rows % GROUP
    real = (rows < BLOCK_Q * GROUP) & (token < last)
    tile_q = load_q(q, token, head, real, q_stride_token, q_stride_head, HEAD_SIZE, HEAD_DIM, DTYPE)

    seq_len = tl.load(seq_lens + sequence)
    shift = seq_len - tl.load(cu_seqlens_q + sequence + 1)  # from a token's place in the batch to its position
    position = shift + token
    first_position, last_position = shift + first, shift + tl.minimum(first + BLOCK_Q, last) - 1
    start = 0
    if starts is not None:
        start = tl.load(starts + sequence)
    # Tiles of keys: all that are seen, and of this split; all rows see those between `full` and `full_end` whole.
    seen, full, seen_end, full_end = start, start, seq_len, seq_len
    if WINDOWED:
        seen = tl.maximum(start, first_position - window + 1)
        full = tl.maximum(start, last_position - window + 1)
    if CAUSAL:
        seen_end, full_end = last_position + 1, first_position + 1
    all_tiles = tl.cdiv(seen_end, BLOCK_N) - seen // BLOCK_N
    splits = tl.minimum(splits, tl.maximum(all_tiles * BLOCK_N // least_keys, 1))
    if split >= splits:
        return
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
    for part in tl.static_range(3):  # what not all rows see yet, what all rows see whole, the diagonal
        if part > 0 or WINDOWED or starts is not None:
            acc, l_i, m_i = attend_tiles(
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
    store_result(
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
def _find_tile(
    cu_seqlens_q,  # int32 [sequences + 1]
    sequences,
    tile,
    BLOCK_Q: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Return the sequence of a tile of queries, the tile's first token, and the end of the sequence's new tokens.

    Sequence i has tiles from cu_seqlens_q[i] // BLOCK_Q + i on. If there is no such tile, the end is no later than its
    first token.
    """
    offs = tl.arange(0, SEQUENCES)
    begins = tl.load(cu_seqlens_q + offs, mask=offs < sequences, other=1 << 30)  # sums stay below 2^31
    sequence = tl.sum((begins // BLOCK_Q + offs <= tile).to(tl.int32)) - 1
    begin = tl.load(cu_seqlens_q + sequence)
    first = begin + (tile - begin // BLOCK_Q - sequence) * BLOCK_Q
    return sequence, first, tl.load(cu_seqlens_q + sequence + 1)
