"""Sampling on a GPU: one launch, one program per row, no sorting.

Top-k: the k-th greatest logit is found by radix selection, eight bits at a time. Top-p: all tokens that top-k keeps
race. The winner is the row's token if top-p keeps it, which it does where the tokens above it have less than the share
asked for. Otherwise top-p drops it and everything that is no greater, and those above it race again, with the same
times: in the end the winner is that of the race of the kept tokens alone. A race's winner is dropped with at most the
probability 1 - top_p, so 1 / top_p races are expected at most. FlashInfer's samplers reject likewise, with fresh random
numbers.
"""

import torch
import triton
import triton.language as tl

from exegpt.kernels.argmax import NO_TOKEN
from exegpt.kernels.philox import ROUNDS
from exegpt.kernels.sampling import Sampling

_BLOCK_SIZE = 4096
"""Logits of a row that are loaded together."""


def sample_gpu(logits: torch.Tensor, sampling: Sampling, block_size: int = _BLOCK_SIZE) -> torch.Tensor:
    """`sampling.sample` by Triton, `block_size` logits of a row at a time."""
    n_rows, n_cols = logits.shape
    out = torch.empty(n_rows, dtype=torch.int64, device=logits.device)
    block_size = min(block_size, max(16, triton.next_power_of_2(n_cols)))
    _sample[(n_rows,)](
        logits_ptr=logits,
        seen_ptr=sampling.seen,
        temperature_ptr=sampling.temperature,
        top_k_ptr=sampling.top_k,
        top_p_ptr=sampling.top_p,
        log_min_p_ptr=sampling.log_min_p,
        penalty_ptr=sampling.penalty,
        seed_ptr=sampling.seed,
        position_ptr=sampling.position,
        slot_ptr=sampling.slot,
        out_ptr=out,
        n_cols=n_cols,
        logits_stride=logits.stride(0),
        BLOCK_SIZE=block_size,
        ROUNDS=ROUNDS,
        NO_TOKEN=NO_TOKEN,
        MIN_P=sampling.log_min_p is not None,
        num_warps=min(16, max(1, block_size // 256)),
    )
    return out


@triton.jit
def _sample(  # type: ignore[no-untyped-def]
    logits_ptr,  # [n_rows, n_cols]
    seen_ptr,  # uint8 [slots, n_cols]
    temperature_ptr,  # float32 [n_rows]
    top_k_ptr,  # int32 [n_rows]
    top_p_ptr,  # float32 [n_rows]
    log_min_p_ptr,  # float32 [n_rows] with MIN_P
    penalty_ptr,  # float32 [n_rows]
    seed_ptr,  # int64 [n_rows]
    position_ptr,  # int64 [n_rows]
    slot_ptr,  # int64 [n_rows]
    out_ptr,  # int64 [n_rows]
    n_cols,  # the vocabulary
    logits_stride,  # elements from one row to the next
    BLOCK_SIZE: tl.constexpr,
    ROUNDS: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    MIN_P: tl.constexpr,
):
    """One row's token, or NO_TOKEN."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    seen_ptr += tl.load(slot_ptr + row) * n_cols
    penalty, temperature = tl.load(penalty_ptr + row), tl.load(temperature_ptr + row)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    k, p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    drawn = temperature > 0
    temperature = tl.where(drawn, temperature, 1.0)
    least = tl.full([], float("-inf"), tl.float32)  # of the logits that top-k keeps
    if drawn & (k > 0) & (k < n_cols):
        least = _kth_greatest(logits_ptr, seen_ptr, n_cols, temperature, penalty, k, BLOCK_SIZE)
    if MIN_P:  # a launch of its own: without one, nothing is added to a row's work
        log_min_p = tl.load(log_min_p_ptr + row)
        if drawn & (log_min_p > float("-inf")):
            top = _greatest(logits_ptr, seen_ptr, n_cols, temperature, penalty, BLOCK_SIZE)
            least = tl.maximum(least, top + log_min_p)
    token = tl.zeros([], tl.int32)
    above = tl.full([], float("-inf"), tl.float32)  # the token's logit, once there is one
    racing = above == float("-inf")
    while racing:
        winner, greater, total, broken = _race(
            logits_ptr, seen_ptr, n_cols, temperature, penalty, seed, position, drawn, least, above, BLOCK_SIZE, ROUNDS
        )
        dropped = (above == float("-inf")) | ((greater > 0) & (greater >= p * total))
        token = tl.where(broken, NO_TOKEN, tl.where(dropped, winner, token))
        above = _scaled(logits_ptr, seen_ptr, tl.maximum(token, 0), n_cols, temperature, penalty)
        racing = ~broken & dropped & drawn & (p < 1) & (above > float("-inf"))
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def _scaled(  # type: ignore[no-untyped-def]
    logits_ptr,  # [n_cols], one row
    seen_ptr,  # uint8 [n_cols], the row's slot
    cols,  # int32 [BLOCK_SIZE]
    n_cols,
    temperature,
    penalty,
):
    """The logits of some columns with the penalty, over the temperature: float32 [BLOCK_SIZE], -inf beyond the row."""
    mask = cols < n_cols
    x = tl.load(logits_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
    if penalty != 1:
        seen = tl.load(seen_ptr + cols, mask=mask, other=0) != 0
        x = tl.where(seen, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty + tl.zeros_like(x))), x)
    return tl.div_rn(x, temperature + tl.zeros_like(x))


@triton.jit
def _greatest(logits_ptr, seen_ptr, n_cols, temperature, penalty, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The greatest of a row's scaled logits."""
    best = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        best = tl.maximum(best, _scaled(logits_ptr, seen_ptr, cols, n_cols, temperature, penalty))
    return tl.max(best, 0)


@triton.jit
def _kth_greatest(logits_ptr, seen_ptr, n_cols, temperature, penalty, k, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The k-th greatest of a row's scaled logits, 0 < k <= n_cols, by radix selection.

    Keys are 32 bits wide and in the order of the logits. Of the keys that begin with the prefix found so far, the next
    eight bits are counted; the digit of the k-th greatest is the highest one that, with those above it, has k of them.
    """
    prefix = tl.zeros([], tl.uint32)
    digits = tl.arange(0, 256)
    for i in range(4):
        shift = 24 - 8 * i
        counts = tl.zeros([256], tl.int32)
        for start in range(0, n_cols, BLOCK_SIZE):
            cols = start + tl.arange(0, BLOCK_SIZE)
            key = _key(_scaled(logits_ptr, seen_ptr, cols, n_cols, temperature, penalty)) >> shift
            counts += tl.histogram((key & 255).to(tl.int32), 256, mask=(cols < n_cols) & (key >> 8 == prefix))
        reached = tl.cumsum(counts, 0, reverse=True) >= k
        digit = tl.sum(reached.to(tl.int32), 0) - 1
        k -= tl.sum(tl.where(digits > digit, counts, 0), 0)
        prefix = prefix * 256 + digit.to(tl.uint32)
    bits = tl.where(prefix >= 0x80000000, prefix ^ 0x80000000, prefix ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    """Floats as unsigned integers of the same order: negative ones have all bits flipped, others the sign's."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)  # both zeros are one
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _race(  # type: ignore[no-untyped-def]
    logits_ptr,  # [n_cols], one row
    seen_ptr,  # uint8 [n_cols], the row's slot
    n_cols,
    temperature,
    penalty,
    seed,
    position,
    drawn,  # whether tokens arrive at random times; otherwise the greatest logit wins
    least,  # the scaled logits that count begin here
    above,  # those of the tokens that race are greater; -inf for all
    BLOCK_SIZE: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Return the token that arrives first, the lowest of equals; the mass of the tokens that race; that of all that
    count; and whether a logit is NaN or has overflowed, or all are ruled out.

    Masses are in units of e^above, zero for all: a race's winner is no further below the greatest logit than times lie
    apart in their logarithms, so they don't overflow.
    """
    best = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK_SIZE], tl.int32)
    greater = tl.zeros([BLOCK_SIZE], tl.float32)
    total = tl.zeros([BLOCK_SIZE], tl.float32)
    broken = tl.zeros([BLOCK_SIZE], tl.int32)
    ruled_out = tl.full([BLOCK_SIZE], 1, tl.int32)
    unit = tl.where(above > float("-inf"), above, float("inf"))
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = _scaled(logits_ptr, seen_ptr, cols, n_cols, temperature, penalty)
        broken |= (~(x < float("inf"))).to(tl.int32)
        ruled_out &= (x == float("-inf")).to(tl.int32)
        mass = tl.where(x >= least, tl.exp(x - unit), 0.0)
        total += mass
        races = (x >= least) & (x > above)
        if tl.max(races.to(tl.int32), 0) > 0:  # the times are what takes long, and few blocks have great logits
            score = x
            if drawn:
                score -= tl.log(_arrival_times(seed, position, start, BLOCK_SIZE, ROUNDS))
            better = races & (score > best)
            best = tl.where(better, score, best)
            token = tl.where(better, cols, token)
            greater += tl.where(races, mass, 0.0)
    winner = tl.min(tl.where(best == tl.max(best, 0), token, n_cols), 0)
    unusable = (tl.max(broken, 0) > 0) | (tl.min(ruled_out, 0) > 0)
    return winner, tl.sum(greater, 0), tl.sum(total, 0), unusable


@triton.jit
def _arrival_times(seed, position, start, BLOCK_SIZE: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`philox.arrival_times` of BLOCK_SIZE tokens from `start` on: float32 [BLOCK_SIZE]."""
    group = (start // 4 + tl.arange(0, BLOCK_SIZE // 4)).to(tl.uint32)
    zero = tl.zeros_like(group)
    place = (position & 0xFFFFFFFF).to(tl.uint32) + zero
    a, b, c, d = tl.philox(seed, group, place, zero, zero, ROUNDS)
    word = tl.join(tl.join(a, c), tl.join(b, d)).reshape([BLOCK_SIZE])
    v = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994039535522)
    series = v * (1 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return tl.where(v < 0.00390625, series, -tl.log(1 - v))
