"""Memory per device: weights, KV blocks, activations, reserve; and how many blocks a schedule needs and gets."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exegpt.cluster import ClusterSpec
from exegpt.model import BYTES, ModelSpec
from exegpt.schedule import BLOCK_SIZE, Stage
from exegpt.workload import Workload
from xsimulator.steady_state import cornish_fisher, decode_iterations_of

Array = NDArray[np.float64]

_RESERVE_BYTES = 2**28
"""The allocator's fragments, the runtime's own buffers."""


@dataclass(frozen=True)
class StageMemory:
    """What one device of a stage holds, in bytes."""

    weights: float
    workspace: float
    block: float
    """One KV block, all of the stage's layers."""
    usable: float
    """What may be used."""

    @property
    def blocks(self) -> int:
        """KV blocks that fit beside the rest; 0 or less where the weights alone don't fit."""
        free = self.usable - self.weights - self.workspace - _RESERVE_BYTES
        return int(free // self.block) if self.block else (2**62 if free >= 0 else -1)

    def at_once(self, tokens: float) -> "StageMemory":
        """Of a device that computes so many tokens at once, made of one that computes a single one."""
        return StageMemory(self.weights, self.workspace * int(tokens), self.block, self.usable)

    def bytes(self, kv_blocks: int) -> float:
        """Bytes in use with a pool of so many blocks."""
        return self.weights + self.workspace + _RESERVE_BYTES + kv_blocks * self.block


def stage_memory(
    model: ModelSpec,
    cluster: ClusterSpec,
    stage: Stage,
    dtype: str,
    kv_dtype: str,
    tokens: int,
    ends: tuple[bool, bool],
) -> StageMemory:
    """Memory of one device of a stage that computes up to `tokens` tokens at once; `ends`: whether it holds the
    embedding and the head.
    """
    start, stop = stage.decoder_layers or (0, 0)
    encoder_start, encoder_stop = stage.encoder_layers or (0, 0)
    first, last = ends
    weights = (stop - start) * model.layer_bytes(stage.tp, dtype)
    weights += (encoder_stop - encoder_start) * model.layer_bytes(stage.tp, dtype, encoder=True)
    shared = first and last and model.tied_embeddings
    outer = first * model.embedding_parameters + last * (
        model.head_parameters + model.tied_embeddings * model.vocab * model.hidden
    )
    outer -= shared * model.vocab * model.hidden
    weights += outer * BYTES[dtype] / stage.tp
    # The widest moment of a layer: its input, the feed-forward's inner product, and the result.
    width = 2 * model.hidden + (3 if model.gated else 2) * model.ffn / stage.tp
    workspace = tokens * width * BYTES[dtype]
    block = BLOCK_SIZE * (stop - start) * model.kv_bytes(stage.tp, kv_dtype)
    return StageMemory(weights, workspace, block, cluster.device.memory_bytes * cluster.memory_fraction)


@dataclass(frozen=True)
class Reservation:
    """Blocks that residents hold: unit moments per query, and the most that one query holds.

    Moments of independent residents add up (`+`).
    """

    mean: float
    variance: float
    third: float
    longest: int

    def __add__(self, other: "Reservation") -> "Reservation":
        return Reservation(
            self.mean + other.mean,
            self.variance + other.variance,
            self.third + other.third,
            max(self.longest, other.longest),
        )

    def times(self, queries: float) -> "Reservation":
        """So many queries together."""
        return Reservation(self.mean * queries, self.variance * queries, self.third * queries, self.longest)

    def quantile(self, queries: float, most: float) -> int:
        """The 99.9th percentile of the blocks held where `queries` queries add up and at most `most` are resident."""
        n = np.array(queries)
        blocks = float(cornish_fisher(n * self.mean, n * self.variance, n * self.third))
        return max(self.longest, int(np.ceil(min(blocks, np.ceil(most) * self.longest))))


def reservation(workload: Workload, iterations: float | None, encoder_decoder: bool = False) -> Reservation:
    """Blocks held by RRA's residents per query that enters a phase of `iterations` (N_D; WAA's k on average).

    A query holds the blocks of all the tokens that it will ever cache from its admission to the end of its c(S)
    phases, so the cohorts of ages 1, 2, ... add up. None: one query, whoever arrives (a static batch).
    """
    need, p = decode_iterations_of(workload.output, encoder_decoder)
    # Those still there after j phases are those with D > j·N_D; after none, all.
    cohorts = 1 if iterations is None else int(-(-int(need.max()) // iterations)) or 1
    ages: Array = np.arange(cohorts, dtype=np.float64) * (iterations or 0)
    return _moments(workload, need, p, ages)


def biased_reservation(workload: Workload, encoder_decoder: bool = False) -> Reservation:
    """Blocks held by one of the residents of iteration-level scheduling: found as often as the iterations it stays."""
    need, p = decode_iterations_of(workload.output, encoder_decoder)
    weight = p * (need + 1)
    return _moments(workload, need, weight / weight.sum(), np.zeros(1))


def _moments(workload: Workload, need: Array, p: Array, ages: Array) -> Reservation:
    """Sums over the cohorts of the central moments of [D > age, or age 0] · blocks(input + D)."""
    inputs = workload.input
    blocks = (inputs.mean + need + (BLOCK_SIZE - 1) / 2) / BLOCK_SIZE  # half a block is lost at the end
    spread = (inputs.std**2 + BLOCK_SIZE**2 / 12) / BLOCK_SIZE**2
    skew = float(inputs.p @ (inputs.s - inputs.mean) ** 3) / BLOCK_SIZE**3
    left = np.where(ages > 0, np.searchsorted(need, ages, side="right"), 0)
    powers = (blocks, blocks**2 + spread, blocks**3 + 3 * blocks * spread + skew)
    m1, m2, m3 = (np.cumsum((p * power)[::-1])[::-1][left] for power in powers)
    longest = -(-(inputs.max + int(need.max())) // BLOCK_SIZE)
    third = m3 - 3 * m1 * m2 + 2 * m1**3
    return Reservation(float(m1.sum()), float((m2 - m1**2).sum()), float(third.sum()), longest)
