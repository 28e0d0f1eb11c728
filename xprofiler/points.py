"""The points at which a model's tables are measured: all of them, or the few that a first answer needs."""

from dataclasses import dataclass, replace

from xcore.specs.model import ModelSpec
from xcore.specs.schedule import BLOCK_SIZE
from xprofiler.recorder import Grid

TIMES_LARGER = 2
"""A measured merged block's size over that of the model's own block: the other model's blocks are twice as large."""
MERGED = Grid("merged_blocks", ("times_larger",), ((TIMES_LARGER,),))


@dataclass(frozen=True)
class Points:
    """Coordinates of the tables' grids, and how many passes go over all of them."""

    tokens: tuple[int, ...]
    """Tokens of an iteration."""
    prompts: tuple[int, ...]
    """Prompts that are prefilled together."""
    batches: tuple[int, ...]
    """Sequences that are decoded together."""
    lengths: tuple[int, ...]
    """Prompts and contexts in tokens; a model's shorter context is a separate point."""
    pasts: tuple[int, ...]
    """Cached tokens before a chunk of a prompt."""
    engine_batches: tuple[int, ...]
    """Sequences of the iterations in which the engine's own time is measured."""
    other_bytes: tuple[int, ...]
    """Bytes of other models' weights; one of this model's iterations is measured after theirs."""
    passes: int
    padded: int = 0
    """Up to so many tokens, an iteration computes as many rows as the next number in `tokens`; 0: none does."""

    def padded_to(self, rows: tuple[int, ...]) -> "Points":
        """Return the points for iterations that are padded to these numbers of rows, where they fit."""
        tokens = (*rows, *(tokens for tokens in self.tokens if tokens > rows[-1]))
        return replace(self, tokens=tokens, padded=rows[-1])


_DECODED = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)
"""Products in tiles take a step behind 16, 32 and 64 rows."""
_PREFILLED = (132, 196, 260, 388, 516, 772, 1028, 2052, 4100)
FULL = Points(
    tokens=(*_DECODED, *_PREFILLED),
    prompts=(1, 4, 16, 64),
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    lengths=(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    pasts=(0, 32, 128, 512, 1024),
    engine_batches=(1, 4, 16, 64, 256),
    other_bytes=(2**25, 2**26, 2**27, 2**28),
    passes=3,
)
FEW = Points(
    tokens=(1, 4, 16, 48, 128, 260, 772, 2052),
    prompts=(1, 16),
    batches=(1, 8, 64, 256),
    lengths=(1, 32, 256, 1024),
    pasts=(0, 128, 1024),
    engine_batches=(1, 16, 128),
    other_bytes=(2**25, 2**26, 2**28),
    passes=1,
)
"""Seconds instead of a minute: a run without a profile measures these first."""


def grids(points: Points, model: ModelSpec, tp: int = 1) -> dict[str, Grid]:
    """Return the grids of a model at a tensor-parallel degree; parts that aren't split are measured at degree 1."""
    longest = model.longest_request or points.lengths[-1]
    lengths = tuple(n for n in points.lengths if n < longest) + ((longest,) if longest <= points.lengths[-1] else ())
    # A block is read as a whole, and the last one of a sequence is half full on average.
    contexts = tuple(n + BLOCK_SIZE // 2 if BLOCK_SIZE <= n < longest - BLOCK_SIZE else n for n in lengths)
    chunks = tuple(n for n in lengths if n <= 512) or lengths[:1]
    pasts = tuple(n for n in points.pasts if n < longest) or (0,)
    layer = (
        Grid("rest", ("tokens",), (points.tokens,)),
        Grid("encode_attention", ("batch", "length"), (points.prompts, lengths)),
        Grid("chunk_attention", ("chunk", "past"), (chunks, pasts)),
        Grid("decode_attention", ("batch", "context"), (points.batches, contexts)),
    )
    of_encoders = tuple(Grid(name, ("tokens",), (points.tokens,)) for name in ("encoder_rest", "cross_projection"))
    uncut = (
        Grid("embedding", ("tokens",), (points.tokens,)),
        Grid("head", ("rows",), (tuple(n for n in points.tokens if n <= 516),)),
        Grid("overhead", ("batch",), (points.engine_batches,)),
        Grid("switch", ("bytes",), (points.other_bytes,)),
        *(() if model.encoder_layers else (MERGED,)),
    )
    remaining = uncut if tp == 1 else (Grid("all_reduce", ("tokens",), (points.tokens,)),)
    encoders = of_encoders if model.encoder_layers else ()
    return {grid.table: grid.of_degree(tp) for grid in (*layer, *encoders, *remaining)}
