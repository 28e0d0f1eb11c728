"""Output lengths by sampling: l = min(X, cap, context - prompt).

X is from the model's distribution of output lengths.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xcore import document
from xcore.arrays import Array, Flags, Integers
from xcore.errors import InputError
from xcore.specs.workload import MAX_TOKENS, LengthDistribution


def quantiles(count: int, seed: int, name: str, shared: bool = False) -> Array:
    """Return uniform random numbers [count], from a separate stream for each name.

    `shared`: one stream for all names, as in SamuLLM's code.
    """
    stream = [seed] if shared else [seed, zlib.crc32(name.encode())]
    return np.random.default_rng(stream).random(count)


def lengths_at(outputs: LengthDistribution, at: Array) -> Integers:
    """Return the lengths at these quantiles, before any cap."""
    cumulative = np.cumsum(outputs.p)
    index = np.minimum(np.searchsorted(cumulative / cumulative[-1], at, side="right"), len(outputs.lengths) - 1)
    return np.asarray(outputs.lengths, dtype=np.int64)[index]


def capped(lengths: Integers, prompts: Integers, context: int, cap: int | None = None) -> Integers:
    """Return output lengths limited by the cap and the context.

    Raises:
        InputError: A prompt leaves no room for one token.
    """
    room = context - prompts
    if len(room) and int(room.min()) < 1:
        raise InputError(f"A prompt of {int(prompts.max()):,} tokens fills the context of {context:,}: shorten it.")
    return np.minimum(np.minimum(lengths, room), lengths if cap is None else cap)


def uncensored(outputs: Integers, cut: "Flags") -> tuple[LengthDistribution, float]:
    """Return the distribution of output lengths from observations, some of which were cut short.

    This is the Kaplan-Meier estimate: of the outputs that reach a length, the share that ends there. What remains is on
    the longest output. A histogram would count an output that was cut at 100 as one that ends there.

    Args:
        outputs: Observed lengths in tokens [n].
        cut: Whether each was cut short, by a limit, the context or the client [n].

    Returns:
        The distribution, and the probability that remains for outputs beyond the longest one.

    Raises:
        InputError: There are no outputs, or one has no token.
    """
    from scipy import stats

    if not len(outputs) or int(outputs.min()) < 1:
        raise InputError("Outputs must be at least one, and each must have at least one token.")
    cdf = stats.ecdf(stats.CensoredData(uncensored=outputs[~cut], right=outputs[cut])).cdf
    beyond = max(0.0, 1.0 - float(cdf.probabilities[-1]))
    cumulative = np.append(np.minimum(cdf.probabilities, 1.0)[:-1], 1.0)
    weights = np.diff(cumulative, prepend=0.0)
    kept = {int(length): float(weight) for length, weight in zip(cdf.quantiles, weights, strict=True) if weight > 0}
    return LengthDistribution(tuple(kept), tuple(kept.values())), beyond


@dataclass(frozen=True)
class ObservedOutputs:
    """The outputs of a log, and the distribution learned from them."""

    ended: int
    cut: int
    distribution: LengthDistribution
    beyond: float
    """The probability of outputs that are longer than all that ended; it is on the longest length."""


def learn_outputs(path: Path) -> ObservedOutputs:
    """Learn output lengths from a JSONL log of answers, such as the results of `exegpt run --out`.

    A line needs `finish_reason`, and `output_tokens` or `output_ids`. Answers that ended with `length` or `cancelled`
    were cut short; failed ones (`error`) are left out. Other keys are ignored.

    Raises:
        InputError: A line is wrong, or no answer has an output; the message names it.
    """
    outputs, cut = [], []
    for number, line in enumerate(document.read_lines(path, "log of answers"), 1):
        if not line.strip():
            continue
        where = f"'{path}', line {number}"
        answer = document.parse_json(line, f"{where},")
        if not isinstance(answer, dict) or not isinstance(reason := answer.get("finish_reason"), str):
            raise InputError(f"{where}: an answer needs finish_reason, like stop or length.")
        ids = answer.get("output_ids")
        tokens = len(ids) if isinstance(ids, list) else answer.get("output_tokens")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= MAX_TOKENS:
            raise InputError(f"{where}: an answer needs output_tokens, a whole number, or output_ids.")
        if reason != "error" and tokens:
            outputs.append(tokens)
            cut.append(reason in ("length", "cancelled"))
    if not outputs:
        raise InputError(f"'{path}' has no answers with tokens: write one JSON object per line.")
    lengths, were_cut = np.array(outputs, dtype=np.int64), np.array(cut)
    return ObservedOutputs(int((~were_cut).sum()), int(were_cut.sum()), *uncensored(lengths, were_cut))
