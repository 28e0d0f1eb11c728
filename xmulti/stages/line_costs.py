"""The cost of one iteration of a replica by batch and lengths: SamuLLM's t = t_comp + t_prep + t_samp.

Each term is a line in its own x; they are combined into one linear form for each batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array
from xcore.specs.cost_table import DegreeCosts, PhaseLines

MOST_SEQUENCES = 512
"""The largest batch: vLLM's setting in the paper's runs."""
BLOCK = 16
"""Tokens of a KV block."""


@dataclass(frozen=True, eq=False)
class LineCosts:
    """A replica's iterations: linear in lengths, with coefficients for each batch from 1 to the largest.

    It doesn't depend on the source of costs: `line_costs` reads a cost table's lines, `profiled_costs` samples an
    exegpt profile.
    """

    prefill: Array
    """[batch + 1, 3]: constant, per token, per squared length. Tokens include padding if `padded`."""
    prefill_sampled: Array
    """[batch + 1]: per token that isn't padding."""
    decode: Array
    """[batch + 1, 3]: constant, per sum of lengths, per longest length."""
    blocks: int
    """KV blocks of a replica."""
    padded: bool = True
    """Whether all prompts of a batch are computed as if they were as long as the longest."""

    def prefill_s(self, lengths: Sequence[int]) -> float:
        """Return seconds to prefill prompts of these lengths in one iteration."""
        each = np.asarray(lengths, dtype=np.float64)
        batch = len(each)
        used = np.full(batch, each.max()) if self.padded else each
        constant, per_token, per_square = self.prefill[batch]
        sampled = self.prefill_sampled[batch] * each.sum()
        return float(constant + per_token * used.sum() + per_square * (used**2).sum() + sampled)

    def decode_s(self, lengths: Sequence[int]) -> float:
        """Return seconds of one decoding iteration of sequences that attend to these numbers of positions."""
        each = np.asarray(lengths, dtype=np.float64)
        constant, per_sum, per_longest = self.decode[len(each)]
        return float(constant + per_sum * each.sum() + per_longest * each.max())


def line_costs(degree: DegreeCosts, padded: bool = True) -> LineCosts:
    """Return the costs of a cost table's degree, interpolated between the measured batches.

    Complete coefficients are interpolated. Complete coefficients are needed, because slopes and intercepts of computing
    are large and nearly cancel if memory bounds attention, and because their product with the batch isn't linear
    between two batches. Without padding, the preparation of inputs is a line in the sum of lengths.
    """
    token, position = degree.macs_per_token, degree.macs_per_position
    known, compute, prepare, sample = _lines(degree.prefill)
    constant = compute[:, 1] + prepare[:, 1] + sample[:, 1]
    prefill = np.stack([constant, compute[:, 0] * token + prepare[:, 0], compute[:, 0] * position], axis=1)
    sampled = _filled(known, sample[:, :1])[:, 0].copy()
    prefill = _filled(known, prefill)
    known, compute, prepare, sample = _lines(degree.decode)
    constant = compute[:, 0] * token * known + compute[:, 1] + prepare[:, 1] + sample[:, 1]
    per_sum, per_longest = compute[:, 0] * position + sample[:, 0], prepare[:, 0] * known
    if not padded:
        per_sum, per_longest = per_sum + prepare[:, 0], np.zeros_like(known)
    decode = _filled(known, np.stack([constant, per_sum, per_longest], axis=1))
    return LineCosts(prefill, sampled, decode, degree.kv_tokens // BLOCK, padded)


def _lines(lines: PhaseLines) -> tuple[Array, Array, Array, Array]:
    """Return the measured batches, and slopes and intercepts [batch, 2] of computing, preparing and sampling."""
    return (
        np.asarray(lines.batches, dtype=np.float64),
        np.asarray(lines.compute, dtype=np.float64),
        np.asarray(lines.prepare, dtype=np.float64),
        np.asarray(lines.sample, dtype=np.float64),
    )


def _filled(known: Array, values: Array) -> Array:
    """Return the columns of values at all batches from 0, interpolated from those at the known batches."""
    batches = np.arange(MOST_SEQUENCES + 1, dtype=np.float64)
    return np.stack([np.interp(batches, known, column) for column in values.T], axis=1)
