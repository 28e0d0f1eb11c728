"""Decoding's attention on a GPU: one new token of every sequence, by a fixed number of programs."""

import torch
import triton
import triton.language as tl

from exegpt.kernels.online_softmax_gpu import attend_tiles, load_q, partial_results, store_result
from exegpt.kernels.work_list import TILE, WorkList, most_slots


def attend_decode(
    common: dict[str, object],
    q: torch.Tensor,
    kv_heads: int,
    cu_seqlens_q: torch.Tensor,
    work: WorkList | None,
    splits: int | None,
) -> None:
    """Launch the kernel with the arguments that `attention_gpu` gives both kernels.

    The kernel follows a work list, or runs `splits` programs for each sequence and KV head.
    """
    if work is not None:
        programs = len(work.first_items) - 1
        slots, lists = most_slots(programs), work._asdict()
    else:
        assert splits is not None
        programs, slots = len(q) * splits, len(q) * splits if splits > 1 else 0
        arrived = torch.zeros(len(q), kv_heads, dtype=torch.int32, device=q.device) if slots else None
        lists = {"first_items": None, "items": None, "first_slots": None, "arrived": arrived}
    _attend_decode[programs, kv_heads](
        **common, **lists, **partial_results(slots, q), cu_seqlens_q=cu_seqlens_q, splits=splits or 0, LIST_TILE=TILE
    )


# Slices of one array of tables begin anywhere in it.
@triton.jit(
    do_not_specialize=["window", "splits", "table_stride", "reach"],
    do_not_specialize_on_alignment=["block_table"],
)
def _attend_decode(
    q,  # [tokens, heads, HEAD_SIZE]
    k_cache,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_SIZE]
    v_cache,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_SIZE]
    block_table,  # int32 [sequences, most blocks]
    cu_seqlens_q,  # int32 [sequences + 1]: the place of each sequence's token, with a work list
    seq_lens,  # int32 [sequences]
    starts,  # int32 [sequences], or None
    bias,  # float32 [heads, 2 * reach + 1], or None
    first_items,  # int32 [programs + 1], or None without a work list
    items,  # int32 [items, 4]: sequence, first tile, tiles, slot; or None
    first_slots,  # int32 [sequences + 1], or None
    arrived,  # int32 [sequences, kv_heads], zeros; None where nothing is split
    out,  # [tokens, heads, HEAD_SIZE]
    partial_out,  # float32 [slots, heads, HEAD_SIZE], or None
    partial_lse,  # float32 [slots, heads], or None
    sm_scale,  # times log2(e), as all scores are in powers of two
    window,  # tokens that are seen, if WINDOWED
    splits,  # programs for each sequence and KV head, without a work list
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
    BLOCK_N: tl.constexpr,
    LIST_TILE: tl.constexpr,  # keys of a tile of the work list
    WINDOWED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute one new token of every sequence: this program's items of the work list, for one KV head."""
    pid, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rows = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + rows % GROUP
    real = rows < GROUP
    size: tl.constexpr = BLOCK_SIZE * HEAD_SIZE

    first_item, end_item = pid, pid + 1
    if items is not None:
        first_item, end_item = tl.load(first_items + pid), tl.load(first_items + pid + 1)
    for item in range(first_item, end_item):
        sequence = tl.load(items + 4 * item) if items is not None else pid // splits
        token = (tl.load(cu_seqlens_q + sequence) if items is not None else sequence).to(tl.int64)
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

        acc, l_i, m_i = attend_tiles(
            acc=tl.zeros([BLOCK_M, HEAD_DIM], tl.float32),
            l_i=tl.zeros([BLOCK_M], tl.float32),
            m_i=tl.full([BLOCK_M], float("-inf"), tl.float32),
            q=load_q(q, token, head, real, q_stride_token, q_stride_head, HEAD_SIZE, HEAD_DIM, DTYPE),
            k_cache=k_cache + kv_head * size,
            v_cache=v_cache + kv_head * size,
            block_stride=kv_heads * size,
            block_table=block_table + sequence.to(tl.int64) * table_stride,
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
            CAUSAL=False,  # no token follows
            WINDOWED=False,  # the window begins at `start`
            MASKED=True,  # bound by memory: masks cost nothing, and a second loop would restart the pipeline
            DTYPE=DTYPE,
        )
        store_result(
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
