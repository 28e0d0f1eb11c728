"""Case: one kernel on one shape, and the sizes that cases are made of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Make = Callable[[], Any]
"""Gives a tensor, or several."""

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One kernel on one shape."""

    name: str
    shape: str
    dtype: str
    run: Make
    """The kernel; gives the tensors that it wrote."""
    reference: Make
    """The same in plain PyTorch, in float32 where that is wider."""
    bytes: int
    """Bytes that must at least be read and written."""
    flops: int = 0
    """Operations that matrix units must at least do; other units' are not counted."""
    peers: Callable[[], dict[str, Make]] = dict
    """Makes what else does it, with tensors of its own where it needs other ones."""
    prepare: Make = lambda: None
    """Makes the tensors that are written in place what they were."""
    exact: bool = False
    """Whether the reference's result is to be met exactly."""
    reads: bool = False
    """Whether nearly all of its bytes are read: what it can reach is then the bandwidth of reading."""


@dataclass(frozen=True)
class Heads:
    """An attention layer's sizes."""

    query: int
    kv: int
    size: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} heads of {self.size}"


@dataclass(frozen=True)
class Sizes:
    """The shapes that cases are made of."""

    heads: Heads
    other_heads: tuple[Heads, ...]
    """Further ones, for attention alone."""
    prompts: tuple[int, int]
    """Sequences, tokens of each."""
    pieces: tuple[tuple[int, ...], tuple[int, ...]]
    """New tokens and contexts of sequences whose prompts come in chunks, some decoding beside them."""
    decoding: tuple[tuple[int, int], ...]
    """Sequences, context of each."""
    ragged: tuple[int, ...]
    """Contexts of sequences that decode together."""
    window: int
    hidden: int
    ffn: int
    vocab: int
    rows: int
    """Rows of norms, gates and logits."""
    layers: int
    """Layers whose cache blocks are copied."""
    blocks: int
    """Blocks that are copied."""


REAL = Sizes(
    heads=Heads(32, 8, 128),  # Llama-3.1-8B
    other_heads=(Heads(40, 40, 128), Heads(32, 32, 80), Heads(32, 8, 96), Heads(28, 4, 64), Heads(16, 8, 256)),
    prompts=(8, 2048),
    pieces=((512, 37, 1, 1, 1, 300), (4096, 37, 1000, 8000, 3, 1111)),
    decoding=(
        (1, 1024),
        (1, 16384),
        (1, 262144),
        (16, 1024),
        (16, 16384),
        (64, 1024),
        (64, 4096),
        (64, 32768),
        (256, 1024),
    ),
    ragged=(32768, *[1024] * 63),
    window=1024,
    hidden=4096,
    ffn=14336,
    vocab=128256,
    rows=256,
    layers=32,
    blocks=64,
)
SMALL = replace(
    REAL, prompts=(2, 600), decoding=((1, 1100),), ragged=(2000, 100), window=64, rows=2, layers=2, blocks=2
)
"""With the heads and widths of REAL: the same kernels are compiled for it."""
TINY = Sizes(
    heads=Heads(4, 2, 16),
    other_heads=(Heads(3, 3, 24),),
    prompts=(2, 19),
    pieces=((5, 1), (20, 37)),
    decoding=((2, 40),),
    ragged=(150, 3),
    window=7,
    hidden=40,
    ffn=24,
    vocab=99,
    rows=3,
    layers=2,
    blocks=3,
)
"""For the interpreter."""
CPU_SIZES = Sizes(
    heads=Heads(8, 4, 64),  # the demo's model
    other_heads=(Heads(32, 8, 128), Heads(12, 12, 64)),
    prompts=(4, 256),
    pieces=((128, 37, 1, 1, 1, 60), (512, 37, 300, 700, 3, 222)),
    decoding=((1, 1024), (16, 256), (64, 512)),
    ragged=(4096, *[256] * 15),
    window=128,
    hidden=512,
    ffn=1408,
    vocab=32000,
    rows=64,
    layers=8,
    blocks=64,
)


def fitting(sizes: Sizes, memory: int, itemsize: int) -> Sizes:
    """Without decoding for which `memory` bytes are too few: over caches, twice for the peers and with room to compute,
    or contexts, whose keys and values the reference spreads to all heads in float32."""
    heads = sizes.heads
    cached, spread = 3 * 2 * heads.kv * heads.size * itemsize, 4 * 4 * heads.query * heads.size
    kept = tuple((n, context) for n, context in sizes.decoding if context * max(n * cached, spread) < memory)
    return replace(sizes, decoding=kept)
