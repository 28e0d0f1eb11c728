"""Attention over merged KV blocks and over head-wise (split) ones beside a model's own blocks, on this CPU.

This is SeaLLM's Figure 9. For a pair A-B, model A decodes over a memory that it shares with model B. Merged blocks are
as large as the larger model's block. Split blocks have the keys and values of one head of one layer, so that every head
of every layer has its own table. The same kernel reads all three: a head over split blocks is a sequence with one head.
Blocks of both models are allocated in turn, and lie in random order. Split blocks lie in two orders: with a block's
heads one after the other, as a fresh memory has them, and each anywhere, as after many requests.

Each model has a quarter of its layers: its blocks are smaller, and both models' in the same proportion. All memories
are in huge pages, as the engine's are. A ratio is the median of the ratios of calls that take turns in one process:
load from elsewhere meets all alike. First, all outputs are compared with plain PyTorch. Tables are the
microseconds to assemble an iteration's block tables of all layers.

    python -m benchmarks.merged_blocks [--batch 4] [--context 512] [--times 30]
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.weight_bits import in_turns
from exegpt.kernels.attention import attention
from exegpt.kernels.kv_layout import key_shape
from xcore.batching.shared_pool import MergedBlocks, MergedPool, block_of
from xcore.console import output
from xcore.specs.builtin_models import builtin_model
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import BLOCK_SIZE
from xprofiler.machine import cpu_name
from xrunner.models.cache import KVCache, scattered_zeros

PAIRS = (("llama-2-7b", "llama-2-7b"), ("llama-2-7b", "llama-2-13b"), ("llama-2-13b", "llama-2-7b"))
"""The paper's pairs, A and B."""
CUT = 4
"""Layers of a model over those that are measured."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LARGEST_ERROR = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest difference to plain PyTorch, for normally distributed queries, keys and values."""


@dataclass(frozen=True)
class CacheLayout:
    """One layer's blocks in a layout; every sequence of the kernel is a sequence, or one of its heads."""

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    """int32 [sequences, blocks], or [sequences × KV heads, blocks]."""


@dataclass(frozen=True)
class Load:
    """A batch of equal decoding sequences of one model."""

    spec: ModelSpec
    batch: int
    context: int
    dtype: str

    @property
    def width(self) -> int:
        """Blocks of a sequence."""
        return -(-self.context // BLOCK_SIZE)

    def random(self, heads: int) -> torch.Tensor:
        """Return random tokens, [batch, heads, head_size]."""
        return torch.randn(self.batch, heads, self.spec.head_size).to(DTYPES[self.dtype])


def own_blocks(load: Load) -> list[CacheLayout]:
    """Return the layers' blocks in the memory of a model alone."""
    cache = KVCache.allocate(load.spec, load.spec.layers, load.batch * load.width, BLOCK_SIZE, load.dtype)
    tables = torch.randperm(load.batch * load.width).int().view(load.batch, load.width)
    return [CacheLayout(*cached, tables) for cached in zip(cache.keys, cache.values, strict=True)]


def merged_blocks(load: Load, other: ModelSpec) -> list[CacheLayout]:
    """Return the layers' blocks in merged blocks, which another model's blocks lie between."""
    sizes = [block_of(spec, BLOCK_SIZE, load.dtype) for spec in (load.spec, other)]
    count = load.batch * load.width
    merged = MergedBlocks.within(2 * count * max(size for size, _ in sizes) * 1.01 + 2**22, sizes)
    pools = [MergedPool(merged, bytes, BLOCK_SIZE, pieces) for bytes, pieces in sizes]
    blocks = []
    for _ in range(count):
        blocks += pools[0].allocate(1)
        pools[1].allocate(1)
    memory = scattered_zeros((merged.total * merged.bytes,), torch.uint8)
    cache = KVCache.over(memory, load.spec, load.spec.layers, BLOCK_SIZE, load.dtype)
    tables = torch.tensor(blocks, dtype=torch.int32)[torch.randperm(count)].view(load.batch, load.width)
    return [CacheLayout(*cached, tables) for cached in zip(cache.keys, cache.values, strict=True)]


def split_blocks(load: Load, other: ModelSpec, scattered: bool) -> list[CacheLayout]:
    """Return the layers' blocks in head-wise blocks, which another model's lie between.

    `scattered`: whether each may be anywhere; otherwise those of a block follow each other.
    """
    spec, count = load.spec, load.batch * load.width
    parts, others = (model.layers * model.kv_heads for model in (spec, other))
    total = count * (parts + others)
    values = scattered_zeros((total, 1, BLOCK_SIZE, spec.head_size), DTYPES[load.dtype])
    keys = scattered_zeros(tuple(key_shape(values)), values.dtype)
    if scattered:
        numbers = torch.randperm(total)[: count * parts].int().view(count, parts)
    else:
        numbers = (torch.randperm(count)[:, None] * (parts + others) + torch.arange(parts)).int()
    numbers = numbers.view(load.batch, load.width, spec.layers, spec.kv_heads)
    tables = [numbers[:, :, layer].transpose(1, 2).reshape(-1, load.width) for layer in range(spec.layers)]
    return [CacheLayout(keys, values, table.contiguous()) for table in tables]


def fill(layouts: Sequence[CacheLayout], load: Load, contents: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write each layer's keys and values, [batch, width, kv_heads, block_size, head_size], into its blocks."""
    for layout, (keys, values) in zip(layouts, contents, strict=True):
        split = layout.values.shape[1] == 1 < load.spec.kv_heads
        for cache, content in ((layout.keys, keys.mT), (layout.values, values)):
            blocks = content.transpose(1, 2).flatten(0, 2)[:, None] if split else content.flatten(0, 1)
            cache[layout.tables.flatten().long()] = blocks.to(cache.dtype)


def decoding(layouts: Sequence[CacheLayout], load: Load, q: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """Return a call of the layers' attention, one after the other; each output has the shape of q."""
    heads, rows = load.spec.heads, len(layouts[0].tables)
    queries = q.view(rows, load.batch * heads // rows, load.spec.head_size)
    offsets = torch.arange(rows + 1, dtype=torch.int32)
    contexts = torch.full((rows,), load.context, dtype=torch.int32)

    def run() -> list[torch.Tensor]:
        return [
            attention(queries, each.keys, each.values, each.tables, offsets, contexts).view(q.shape) for each in layouts
        ]

    return run


def plain_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int) -> torch.Tensor:
    """Return attention in plain PyTorch over contents as in `fill`."""
    group = q.shape[1] // keys.shape[2]
    k, v = (
        content.transpose(1, 2).flatten(2, 3)[:, :, :context].float().repeat_interleave(group, 1)
        for content in (keys, values)
    )
    weights = torch.softmax(q.float()[:, :, None] @ k.mT / math.sqrt(q.shape[2]), -1)
    return (weights @ v)[:, :, 0]


def tables_seconds(load: Load, split: bool, times: int) -> float:
    """Return the seconds to copy the sequences' tables of all layers into a batch's; merged layers share one."""
    shape = (CUT * load.spec.layers * load.spec.kv_heads, load.width) if split else (load.width,)
    tables = [torch.zeros(shape, dtype=torch.int32) for _ in range(load.batch)]
    (seconds,) = in_turns([lambda: torch.stack(tables)], times)
    return statistics.median(seconds)


@torch.inference_mode()
def measure(pair: tuple[ModelSpec, ModelSpec], batch: int, context: int, dtype: str, times: int) -> list[str]:
    """Return a pair's row, after comparing all layouts' outputs with plain PyTorch."""
    load = Load(pair[0], batch, context, dtype)
    layouts = {
        "own": own_blocks(load),
        "merged": merged_blocks(load, pair[1]),
        "split": split_blocks(load, pair[1], False),
        "scattered": split_blocks(load, pair[1], True),
    }
    shape = batch, load.width, load.spec.kv_heads, BLOCK_SIZE, load.spec.head_size
    kind = DTYPES[dtype]
    contents = [(torch.randn(shape).to(kind), torch.randn(shape).to(kind)) for _ in range(load.spec.layers)]
    q = load.random(load.spec.heads)
    calls = {}
    for name, of_layers in layouts.items():
        fill(of_layers, load, contents)
        calls[name] = decoding(of_layers, load, q)
        for out, content in zip(calls[name](), contents, strict=True):
            error = float((out.float() - plain_attention(q, *content, context)).abs().max())
            if not error <= LARGEST_ERROR[dtype]:
                sys.exit(f"{name} blocks differ from plain PyTorch by {error:.3g}: at most {LARGEST_ERROR[dtype]}.")
    seconds = dict(zip(calls, in_turns([*calls.values()], times), strict=True))
    own_s = statistics.median(seconds["own"])
    ratios = [
        statistics.median(a / b for a, b in zip(seconds[name], seconds["own"], strict=True)) - 1
        for name in ("merged", "split", "scattered")
    ]
    tables = [tables_seconds(load, split, times) for split in (False, True)]
    short = "-".join(f"L{spec.name.rsplit('-', 1)[1].removesuffix('b')}" for spec in pair)
    return [
        short,
        f"{CUT * 1e3 * own_s:,.1f}",
        *(f"{share:+.1%}" for share in ratios),
        *(f"{1e6 * table_s:,.0f}" for table_s in tables),
    ]


def main(argv: list[str]) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="decoding sequences (4)")
    parser.add_argument("--context", type=int, default=512, help="tokens of each (512)")
    parser.add_argument("--dtype", choices=[*DTYPES], default="fp32", help="of keys and values (fp32)")
    parser.add_argument("--times", type=int, default=30, help="turns (30)")
    args = parser.parse_args(argv)
    began = time.process_time()
    names = sorted({name for pair in PAIRS for name in pair})
    cut = {
        name: replace(model, layers=model.layers // CUT)
        for name, model in zip(names, map(builtin_model, names), strict=True)
    }
    rows = [measure((cut[a], cut[b]), args.batch, args.context, args.dtype, args.times) for a, b in PAIRS]
    columns = ["A-B", "A's attention alone, ms", "merged", "split", "split, scattered", "tables, merged, µs", "split"]
    output.table(columns, rows, f"{args.batch} sequences of {args.context} tokens, {args.dtype}")
    print(f"On {cpu_name()}, {torch.get_num_threads()} threads; {time.process_time() - began:.0f} CPU s.")


if __name__ == "__main__":
    main(sys.argv[1:])
