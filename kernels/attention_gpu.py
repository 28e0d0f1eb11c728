"""Attention over a paged cache on a GPU, in Triton: the online softmax of FlashAttention-2.

A program has a tile of rows, which are tokens of one sequence times the query heads of one KV head. It goes through the
keys that they see, BLOCK_N at a time. Nothing is read back to the host.
"""

import math

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from exegpt.kernels.attention_decode_gpu import attend_decode
from exegpt.kernels.attention_prefill_gpu import attend_prefill
from exegpt.kernels.attention_tiles import Tile, choose_tile, head_dim, num_splits
from exegpt.kernels.gpu_device import architecture
from exegpt.kernels.work_list import TILE, WorkList


def programs_of_decoding(heads: int, values: torch.Tensor) -> int:
    """Return how many programs per KV head run at a time, for a work list with `heads` query heads."""
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
    max_query_len: int | None = None,
) -> torch.Tensor:
    """Compute `attention.attention` by Triton, with keys in the layout of values.

    Without a work list, `splits` programs share the keys of the same rows; None: the number follows FlashAttention's
    rule. `keys` and `values` are contiguous, and so are the vectors of `q` and `out`.
    """
    if not len(q):
        return out
    gpu, phase = architecture(q.device), "decode" if work is not None or len(q) == len(tables) else "prefill"
    group, kv_heads = q.shape[1] // values.shape[1], values.shape[1]
    tile = choose_tile(
        gpu, phase, max_query_len or len(q) // len(tables), group, q.shape[2], q.element_size(), bias is not None
    )
    window = window if causal else None
    block_q = 1 if phase == "decode" else tile.block_m // group  # tokens
    tiles = len(q) // block_q + (0 if phase == "decode" else len(tables))  # of rows, at most
    if work is None and splits is None:
        most_keys = tables.shape[1] * values.shape[2] if window is None else window + block_q
        full = (
            tiles if max_query_len is None else -(-len(q) // block_q)
        )  # most tiles of `len(tables)` padding sequences are empty
        splits = num_splits(full * kv_heads, gpu.multiprocessors * tile.resident, -(-most_keys // TILE))
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
        attend_decode(common, q, kv_heads, offsets, work, splits)
    else:
        assert splits is not None, "a work list is decoding's"
        attend_prefill(common, q, kv_heads, offsets, tiles, block_q, splits, causal)
    return out


def _sizes(
    q: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
) -> dict[str, object]:
    """Return the sizes that both kernels take."""
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


@triton.jit
def _probe():  # type: ignore[no-untyped-def]
    pass


INTERPRETED = isinstance(_probe, InterpretedFunction)
"""Whether kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET was 1 when Triton was imported."""

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def operand(dtype: torch.dtype) -> tl.dtype:
    """Return the Triton dtype in which tiles of `dtype` are multiplied.

    This is `dtype` itself, except float32 in the interpreter, which stores bfloat16 as integers.
    """
    return tl.float32 if INTERPRETED else _DTYPES[dtype]
