"""Evaluate how well rankers order prompts by the lengths of their outputs, compared with methods without training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exegpt.api.ranking.examples import Example
from xcore.arrays import Array, Integers
from xcore.errors import InputError
from xcore.orders.noise import kendall_tau
from xcore.orders.ranker import Ranker


@dataclass(frozen=True)
class RankingRow:
    """A ranking method, and its Kendall's tau-b with the lengths; None if it can't be computed."""

    name: str
    tau: float
    within: dict[str, float]
    """Kendall's tau-b within each kind of prompts."""
    across: float | None
    """The result for pairs of different kinds; pairs that the method leaves tied count as half right."""


@dataclass(frozen=True)
class RankingEvaluation:
    """The results of all methods on the same prompts."""

    prompts: int
    kinds: dict[str, int]
    """The number of prompts of each kind."""
    rows: tuple[RankingRow, ...]


def evaluate(rankers: dict[str, Ranker], train: Sequence[Example], examples: Sequence[Example]) -> RankingEvaluation:
    """Evaluate the rankers on `examples`, and compare them with baselines.

    The baselines are the lengths of the prompts, the median output length of each kind in `train`, and the true
    lengths.
    """
    if len(examples) < 2:
        raise InputError(f"An evaluation needs at least 2 prompts, and there are {len(examples)}: add more.")
    lengths = np.array([example.output_tokens for example in examples])
    kinds = np.array([example.kind for example in examples])
    prompts = [example.prompt for example in examples]
    ways: dict[str, Array] = {name: np.asarray(ranker.scores(prompts)) for name, ranker in rankers.items()}
    ways["prompt length, short first"] = -np.array([float(len(prompt)) for prompt in prompts])
    ways["prompt length, long first"] = -ways["prompt length, short first"]
    medians = _medians(train or examples)
    if len(medians) > 1:
        ways["the kind's median"] = np.array([-medians.get(kind, 0.0) for kind in kinds])
    ways["oracle"] = -lengths.astype(np.float64)
    names = sorted(set(kinds.tolist())) if len(medians) > 1 else []
    return RankingEvaluation(
        len(examples),
        {name: int((kinds == name).sum()) for name in names},
        tuple(_row(name, scores, lengths, kinds, names) for name, scores in ways.items()),
    )


def _row(name: str, scores: Array, lengths: Integers, kinds: NDArray[np.str_], names: list[str]) -> RankingRow:
    within = {kind: kendall_tau(scores[kinds == kind], lengths[kinds == kind]) for kind in names}
    return RankingRow(name, kendall_tau(scores, lengths), within, _across(scores, lengths, kinds) if names else None)


def _across(scores: Array, lengths: Integers, kinds: NDArray[np.str_]) -> float:
    """Return the share of correctly ordered pairs minus that of wrong ones; pairs differ in kind and length."""
    apart = (kinds[:, None] != kinds[None, :]) & (lengths[:, None] < lengths[None, :])
    sign = np.sign(scores[:, None] - scores[None, :])
    return float(sign[apart].sum() / max(1, apart.sum()))


def _medians(examples: Sequence[Example]) -> dict[str, float]:
    kinds = sorted({example.kind for example in examples})
    return {kind: float(np.median([e.output_tokens for e in examples if e.kind == kind])) for kind in kinds}
