"""Sampling on a GPU. No sorting: the least logit that top-k and top-p keep is found by bisection between logits, over
the whole row until few enough are in question to be held in registers."""

import torch
import triton
import triton.language as tl

from exegpt.kernels.philox import ROUNDS
from exegpt.kernels.sampling import Sampling

_COLUMNS = 8192
"""Logits of a row that are looked at together."""
_TOKENS = 256
"""Tokens of a row's history that one program takes."""


def sample_gpu(logits: torch.Tensor, sampling: Sampling, columns: int = _COLUMNS) -> torch.Tensor:
    """`sampling.sample` by Triton, `columns` logits of a row at a time."""
    rows, vocab = logits.shape
    scaled = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    columns = min(columns, max(16, triton.next_power_of_2(vocab)))
    grid = (rows, triton.cdiv(vocab, columns))
    _scale[grid](logits, scaled, sampling.temperature, vocab, logits.stride(0), COLUMNS=columns, num_warps=4)
    most = sampling.history.shape[1]
    if most:
        _penalise[(rows, triton.cdiv(most, _TOKENS))](
            logits,
            scaled,
            sampling.history,
            sampling.penalty,
            sampling.temperature,
            vocab,
            most,
            logits.stride(0),
            sampling.history.stride(0),
            TOKENS=_TOKENS,
        )
    _choose[(rows,)](
        scaled,
        torch.empty(rows, columns, dtype=torch.float32, device=logits.device),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.seed,
        sampling.position,
        out,
        vocab,
        COLUMNS=columns,
        ROUNDS=ROUNDS,
        num_warps=min(16, max(1, columns // 512)),
    )
    return out


@triton.jit
def _scale(logits, scaled, temperature, vocab, logits_row, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some logits of one row over its temperature, float32."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(logits + row * logits_row + i, mask=i < vocab, other=0.0).to(tl.float32)
    heat = tl.load(temperature + row)
    tl.store(scaled + row * vocab + i, tl.div_rn(x, tl.where(heat > 0, heat, 1.0)), mask=i < vocab)


@triton.jit(do_not_specialize=["most", "history_row"])
def _penalise(  # type: ignore[no-untyped-def]
    logits, scaled, history, penalty, temperature, vocab, most, logits_row, history_row, TOKENS: tl.constexpr
):
    """Some tokens of a row's history. A token that occurs twice is written twice, the same."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    token = tl.load(history + row * history_row + i, mask=i < most, other=-1)
    x = tl.load(logits + row * logits_row + token, mask=token >= 0, other=0.0).to(tl.float32)
    factor, heat = tl.load(penalty + row), tl.load(temperature + row)
    x = tl.where(x < 0, x * factor, tl.div_rn(x, factor + tl.zeros_like(x)))
    x = tl.div_rn(x, tl.where(heat > 0, heat, 1.0) + tl.zeros_like(x))
    tl.store(scaled + row * vocab + token, x, mask=token >= 0)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    scaled,
    scratch,
    temperature,
    top_k,
    top_p,
    seed,
    position,
    out,
    vocab,
    COLUMNS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """One row's token. `scratch` is float32 [rows, COLUMNS]."""
    row = tl.program_id(0).to(tl.int64)
    line = scaled + row * vocab
    few = scratch + row * COLUMNS
    if tl.load(temperature + row) == 0:
        token = _first(line, vocab, float("-inf"), 0, 0, COLUMNS, ROUNDS, False)
    else:
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        least = float("-inf")
        if ((k > 0) & (k < vocab)) | (p < 1):
            top, least = _extremes(line, vocab, COLUMNS)
            held = vocab
            if (k > 0) & (k < vocab):
                least, held = _least_kept(line, few, vocab, top, least, held, k, 0.0, COLUMNS)
            if p < 1:
                _, mass, _, _ = _above(line, vocab, top, least, COLUMNS)
                least, held = _least_kept(line, few, vocab, top, least, held, 0, p * mass, COLUMNS)
        token = _first(line, vocab, least, tl.load(seed + row), tl.load(position + row), COLUMNS, ROUNDS, True)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _extremes(line, vocab, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The greatest and the least finite logit."""
    top = tl.full([COLUMNS], float("-inf"), tl.float32)
    least = tl.full([COLUMNS], float("inf"), tl.float32)
    for first in range(0, vocab, COLUMNS):
        i = first + tl.arange(0, COLUMNS)
        x = tl.load(line + i, mask=i < vocab, other=float("-inf"))
        top = tl.maximum(top, x)
        least = tl.minimum(least, tl.where(x > float("-inf"), x, float("inf")))
    return tl.max(top, 0), tl.min(least, 0)


@triton.jit
def _above(line, vocab, top, pivot, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the logits from `pivot` on: how many, their mass in units of `top`'s, the least; and the greatest below."""
    count = tl.zeros([COLUMNS], tl.int32)
    mass = tl.zeros([COLUMNS], tl.float32)
    least = tl.full([COLUMNS], float("inf"), tl.float32)
    below = tl.full([COLUMNS], float("-inf"), tl.float32)
    for first in range(0, vocab, COLUMNS):
        i = first + tl.arange(0, COLUMNS)
        x = tl.load(line + i, mask=i < vocab, other=float("-inf"))
        kept = x >= pivot
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp2((x - top) * 1.4426950408889634), 0.0)
        least = tl.minimum(least, tl.where(kept, x, float("inf")))
        below = tl.maximum(below, tl.where(kept, float("-inf"), x))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(least, 0), tl.max(below, 0)


@triton.jit
def _least_kept(line, few, vocab, top, least, held, k, wanted, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The greatest logit for which it and all above are at least k and have the mass `wanted`, and how many they are.

    `least`, with `held` logits from it on at most, is known to do. Both ends of what is in question are logits all the
    time, so that it ends with one.
    """
    low = least
    high = top
    above = 0
    mass_above = 0.0
    while (low < high) & (held - above > COLUMNS):
        pivot = _between(low, high)
        count, mass, lowest, below = _above(line, vocab, top, pivot, COLUMNS)
        enough = (count >= k) & (mass >= wanted)
        low = tl.where(enough, lowest, low)
        held = tl.where(enough, count, held)
        high = tl.where(enough, high, below)
        above = tl.where(enough, above, count)
        mass_above = tl.where(enough, mass_above, mass)
    if low < high:
        x = _gather(line, few, vocab, low, high, COLUMNS)
        weight = tl.exp2((x - top) * 1.4426950408889634)
        while low < high:
            pivot = _between(low, high)
            kept = x >= pivot
            count = above + tl.sum(kept.to(tl.int32), 0)
            mass = mass_above + tl.sum(tl.where(kept, weight, 0.0), 0)
            enough = (count >= k) & (mass >= wanted)
            low = tl.where(enough, tl.min(tl.where(kept, x, float("inf")), 0), low)
            held = tl.where(enough, count, held)
            high = tl.where(enough, high, tl.max(tl.where(kept, float("-inf"), x), 0))
    return low, held


@triton.jit
def _between(low, high):  # type: ignore[no-untyped-def]
    """A number above low, and not above high."""
    middle = low + (high - low) * 0.5
    return tl.where(middle > low, middle, high)


@triton.jit
def _gather(line, few, vocab, low, high, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits from `low` to `high`, no more than COLUMNS, then -inf."""
    tl.debug_barrier()  # what the other search wrote there has been read
    held = 0
    for first in range(0, vocab, COLUMNS):
        i = first + tl.arange(0, COLUMNS)
        x = tl.load(line + i, mask=i < vocab, other=float("-inf"))
        asked = (x >= low) & (x <= high)
        place = held + tl.cumsum(asked.to(tl.int32), 0) - 1
        tl.store(few + place, x, mask=asked)
        held += tl.sum(asked.to(tl.int32), 0)
    tl.debug_barrier()  # all have written
    i = tl.arange(0, COLUMNS)
    return tl.load(few + i, mask=i < held, other=float("-inf"))


@triton.jit
def _first(  # type: ignore[no-untyped-def]
    line, vocab, least, seed, position, COLUMNS: tl.constexpr, ROUNDS: tl.constexpr, DRAWN: tl.constexpr
):
    """The token with the greatest logit, minus the logarithm of its arrival time where DRAWN; the first of equals."""
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    at = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, vocab, COLUMNS):
        i = first + tl.arange(0, COLUMNS)
        x = tl.load(line + i, mask=i < vocab, other=float("-inf"))
        score = tl.where(x >= least, x, float("-inf"))
        if DRAWN:
            group = (first // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32)
            zero = tl.zeros_like(group)
            place = (position & 0xFFFFFFFF).to(tl.uint32) + zero
            a, b, c, d = tl.philox(seed, group, place, zero, zero, ROUNDS)
            word = tl.join(tl.join(a, c), tl.join(b, d)).reshape([COLUMNS])
            v = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994039535522)
            series = v * (1 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
            score -= tl.log(tl.where(v < 0.00390625, series, -tl.log(1 - v)))
        better = score > best
        best = tl.where(better, score, best)
        at = tl.where(better, i, at)
    return tl.min(tl.where(best == tl.max(best, 0), at, vocab), 0)
