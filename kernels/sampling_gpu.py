"""Sampling on a GPU: one launch, one program per row, no sorting.

Greedy: one pass, in which each column of a block keeps the greatest logit that it saw.

Top-k: the same pass. The k-th greatest of the columns' logits is no greater than that of the whole row, and few logits
lie above it. A second pass therefore lists these, and the rest of the work reads the list alone. If the list is full,
the k-th greatest logit of the row is found by radix selection, eight bits at a time.

Top-p: all tokens that top-k keeps race. The winner is the row's token if top-p keeps it: the tokens above it have less
than the requested share. Otherwise top-p drops it and every token that is no greater, and the tokens above it race
again, with the same times. In the end, the winner is that of the race of the kept tokens alone. A race's winner is
dropped with at most the probability 1 - top_p, so at most 1 / top_p races are expected. FlashInfer's samplers reject
likewise, with fresh random numbers.
"""

import torch
import triton
import triton.language as tl

from exegpt.kernels.argmax import NO_TOKEN
from exegpt.kernels.philox import ROUNDS
from exegpt.kernels.sampling import Sampling

_BLOCK_SIZE = 2048
"""Number of a row's logits that are loaded together."""
_NUM_WARPS = 8
_NUM_STAGES = 3
"""Triton's stages: blocks are read two ahead."""
_MAX_REGISTERS = 128
"""Registers per thread: two programs run on a multiprocessor at a time.

Of eight numbers timed on an H100 this was the fastest (docs/log/kernels.md).
"""
_LISTED = 1024
"""Tokens of a row's list: twice the largest usual top-k, with slots left for logits equal to the last."""


def sample_gpu(
    logits: torch.Tensor,
    sampling: Sampling,
    block_size: int = _BLOCK_SIZE,
    listed: int = _LISTED,
) -> torch.Tensor:
    """Run `sampling.sample` by Triton, `block_size` logits of a row at a time, with lists of up to `listed` tokens."""
    n_rows, n_cols = logits.shape
    out = torch.empty(n_rows, dtype=torch.int64, device=logits.device)
    block_size = min(block_size, max(16, triton.next_power_of_2(n_cols)))
    listed = min(listed, block_size)
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
        list_ptr=torch.empty(n_rows, listed, dtype=torch.int32, device=logits.device),
        out_ptr=out,
        n_cols=n_cols,
        logits_stride=logits.stride(0),
        BLOCK_SIZE=block_size,
        LISTED=listed,
        STAGES=_NUM_STAGES,
        ROUNDS=ROUNDS,
        NO_TOKEN=NO_TOKEN,
        MIN_P=sampling.log_min_p is not None,
        num_warps=min(_NUM_WARPS, max(1, block_size // 256)),
        maxnreg=_MAX_REGISTERS,
    )
    return out


@triton.jit
def _sample(
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
    list_ptr,  # int32 [n_rows, LISTED], written
    out_ptr,  # int64 [n_rows]
    n_cols,  # the vocabulary
    logits_stride,  # elements from one row to the next
    BLOCK_SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    STAGES: tl.constexpr,
    ROUNDS: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    MIN_P: tl.constexpr,
):
    """Choose one row's token, or NO_TOKEN."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    seen_ptr += tl.load(slot_ptr + row) * n_cols
    list_ptr += row * LISTED
    penalty, temperature = tl.load(penalty_ptr + row), tl.load(temperature_ptr + row)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    k, p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    drawn = temperature > 0
    temperature = tl.where(drawn, temperature, 1.0)
    some = drawn & (k > 0) & (k < n_cols)
    least = tl.full([], float("-inf"), tl.float32)  # of the logits that top-k keeps
    token, listed = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    broken = tl.zeros([], tl.int1)
    if (not drawn) | (some & (k <= LISTED)):
        best, token, broken = _survey(logits_ptr, seen_ptr, n_cols, temperature, penalty, BLOCK_SIZE, STAGES)
        token = tl.where(broken, NO_TOKEN, token)
        if drawn:
            least, listed = _list_kept(
                logits_ptr, seen_ptr, list_ptr, n_cols, temperature, penalty, best, k, BLOCK_SIZE, LISTED, STAGES
            )
    if some & (listed == 0):
        least = _kth_greatest(logits_ptr, seen_ptr, n_cols, temperature, penalty, k, BLOCK_SIZE, STAGES)
    if MIN_P:  # a separate kernel: rows without min-p do no more work
        log_min_p = tl.load(log_min_p_ptr + row)
        if drawn & (log_min_p > float("-inf")):
            top = _greatest(logits_ptr, seen_ptr, n_cols, temperature, penalty, BLOCK_SIZE, STAGES)
            least = tl.maximum(least, top + log_min_p)
    above = tl.full([], float("-inf"), tl.float32)  # the token's logit, once there is one
    racing = drawn & ~broken
    while racing:
        if listed > 0:
            x, cols = _load_list(logits_ptr, seen_ptr, list_ptr, listed, n_cols, temperature, penalty, LISTED)
            winner, greater, total = _race_listed(x, cols, n_cols, seed, position, least, above, ROUNDS)
        else:
            winner, greater, total, broken = _race(
                logits_ptr, seen_ptr, n_cols, temperature, penalty, seed, position, least, above, BLOCK_SIZE, ROUNDS
            )
        dropped = (above == float("-inf")) | ((greater > 0) & (greater >= p * total))
        token = tl.where(broken, NO_TOKEN, tl.where(dropped, winner, token))
        above = _scaled(logits_ptr, seen_ptr, tl.maximum(token, 0), n_cols, temperature, penalty)
        racing = ~broken & dropped & (p < 1) & (above > float("-inf"))
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def _scaled(
    logits_ptr,  # [n_cols], one row
    seen_ptr,  # uint8 [n_cols], the row's slot
    cols,  # int32 [BLOCK_SIZE]
    n_cols,
    temperature,
    penalty,
):
    """Return the logits of some columns with the penalty, over the temperature: float32 [BLOCK_SIZE].

    They are -inf beyond the row.
    """
    mask = cols < n_cols
    x = tl.load(logits_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
    if penalty != 1:
        seen = tl.load(seen_ptr + cols, mask=mask, other=0) != 0
        x = tl.where(seen, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty + tl.zeros_like(x))), x)
    if temperature != 1:
        x = tl.div_rn(x, temperature + tl.zeros_like(x))
    return x


@triton.jit
def _survey(logits_ptr, seen_ptr, n_cols, temperature, penalty, BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr):
    """Survey a row's scaled logits in one pass.

    Returns:
        The greatest of every column of the row's blocks, float32 [BLOCK_SIZE]; the place of the greatest of all, the
        first of equals; and whether a logit is NaN or has overflowed, or all are ruled out.
    """
    best = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK_SIZE], tl.int32)
    broken = tl.zeros([BLOCK_SIZE], tl.int32)
    for start in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = _scaled(logits_ptr, seen_ptr, cols, n_cols, temperature, penalty)
        broken |= (~(x < float("inf"))).to(tl.int32)
        better = x > best
        best = tl.where(better, x, best)
        place = tl.where(better, cols, place)
    top = tl.max(best, 0)
    winner = tl.min(tl.where(best == top, place, n_cols), 0)
    return best, winner, (tl.max(broken, 0) > 0) | (top == float("-inf"))


@triton.jit
def _list_kept(
    logits_ptr,  # [n_cols], one row
    seen_ptr,  # uint8 [n_cols], the row's slot
    list_ptr,  # int32 [LISTED], written
    n_cols,
    temperature,
    penalty,
    best,  # float32 [BLOCK_SIZE], of `_survey`
    k,  # 0 < k < n_cols, at most LISTED
    BLOCK_SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """List the tokens that top-k keeps, and some more. Return the least logit kept, and the number of listed tokens.

    That number is 0 if the list is too short for them.
    """
    bound = _kth_of_block(best, tl.full([BLOCK_SIZE], 1, tl.int1), k)
    listed = _list(logits_ptr, seen_ptr, list_ptr, n_cols, temperature, penalty, bound, BLOCK_SIZE, LISTED, STAGES)
    least = tl.full([], float("-inf"), tl.float32)
    if listed > LISTED:
        listed = tl.zeros([], tl.int32)
    else:
        x, _ = _load_list(logits_ptr, seen_ptr, list_ptr, listed, n_cols, temperature, penalty, LISTED)
        least = _kth_of_block(x, tl.arange(0, LISTED) < listed, k)
    return least, listed


@triton.jit
def _list(
    logits_ptr,  # [n_cols], one row
    seen_ptr,  # uint8 [n_cols], the row's slot
    list_ptr,  # int32 [LISTED], written
    n_cols,
    temperature,
    penalty,
    bound,
    BLOCK_SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """List the tokens whose scaled logits are at least `bound`, in order, and return their number.

    Tokens beyond the list are only counted.
    """
    count = tl.zeros([], tl.int32)
    for start in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = _scaled(logits_ptr, seen_ptr, cols, n_cols, temperature, penalty)
        taken = ((x >= bound) & (cols < n_cols)).to(tl.int32)
        more = tl.sum(taken, 0)
        if (more > 0) & (count < LISTED):
            place = count + tl.cumsum(taken, 0) - 1
            tl.store(list_ptr + place, cols, mask=(taken > 0) & (place < LISTED))
        count += more
    tl.debug_barrier()  # all of the program's threads read what any of them wrote
    return count


@triton.jit
def _load_list(logits_ptr, seen_ptr, list_ptr, listed, n_cols, temperature, penalty, LISTED: tl.constexpr):
    """Return the scaled logits, float32 [LISTED], and the columns, int32 [LISTED], of the listed tokens.

    Beyond the listed tokens they are -inf and `n_cols`.
    """
    places = tl.arange(0, LISTED)
    cols = tl.load(list_ptr + places, mask=places < listed, other=n_cols)
    return _scaled(logits_ptr, seen_ptr, cols, n_cols, temperature, penalty), cols


@triton.jit
def _greatest(logits_ptr, seen_ptr, n_cols, temperature, penalty, BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr):
    """Return the greatest of a row's scaled logits."""
    best = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    for start in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_SIZE)
        best = tl.maximum(best, _scaled(logits_ptr, seen_ptr, cols, n_cols, temperature, penalty))
    return tl.max(best, 0)


@triton.jit
def _kth_greatest(
    logits_ptr, seen_ptr, n_cols, temperature, penalty, k, BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr
):
    """Return the k-th greatest of a row's scaled logits, 0 < k <= n_cols, by radix selection.

    Keys are 32 bits wide and in the order of the logits. Of the keys that begin with the prefix found so far, the next
    eight bits are counted. The digit of the k-th greatest key is the highest for which at least k keys have this digit
    or a higher one.
    """
    prefix = tl.zeros([], tl.uint32)
    for i in range(4):
        counts = tl.zeros([256], tl.int32)
        for start in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
            cols = start + tl.arange(0, BLOCK_SIZE)
            x = _scaled(logits_ptr, seen_ptr, cols, n_cols, temperature, penalty)
            counts += _count_digits(x, cols < n_cols, prefix, 24 - 8 * i)
        prefix, k = _next_digit(counts, prefix, k)
    return _logit(prefix)


@triton.jit
def _kth_of_block(x, real, k):
    """Return `_kth_greatest` of the elements of one block that are `real`, of which there are at least k."""
    prefix = tl.zeros([], tl.uint32)
    for i in range(4):
        prefix, k = _next_digit(_count_digits(x, real, prefix, 24 - 8 * i), prefix, k)
    return _logit(prefix)


@triton.jit
def _count_digits(x, real, prefix, shift):
    """Count for each digit the keys that begin with a prefix and continue with the digit: int32 [256]."""
    key = _key(x) >> shift
    return tl.histogram((key & 255).to(tl.int32), 256, mask=real & (key >> 8 == prefix))


@triton.jit
def _next_digit(counts, prefix, k):
    """Return the prefix of the k-th greatest key with its next digit, and its rank among the keys with that prefix."""
    reached = tl.cumsum(counts, 0, reverse=True) >= k
    digit = tl.sum(reached.to(tl.int32), 0) - 1
    k -= tl.sum(tl.where(tl.arange(0, 256) > digit, counts, 0), 0)
    return prefix * 256 + digit.to(tl.uint32), k


@triton.jit
def _key(x):
    """Convert floats to unsigned integers of the same order: flip all bits of negative floats, else the sign bit."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)  # -0.0 becomes 0.0
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _logit(key):
    """Convert a key to its float."""
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _race(
    logits_ptr,  # [n_cols], one row
    seen_ptr,  # uint8 [n_cols], the row's slot
    n_cols,
    temperature,
    penalty,
    seed,
    position,
    least,  # the least scaled logit that counts
    above,  # tokens with greater scaled logits race; -inf for all
    BLOCK_SIZE: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Run one race of a row's tokens.

    Masses are in units of e^above; for a race of all tokens they are zero. The winner's logit is close enough to the
    greatest one that masses don't overflow.

    Returns:
        The token that arrives first, the lowest of equals; the mass of the tokens that race; the mass of all that
        count; and whether a logit is NaN or has overflowed, or all are ruled out.
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
        if (
            tl.max(races.to(tl.int32), 0) > 0
        ):  # the random times take most of the time, and few blocks have large logits
            score = x - tl.log(_arrival_times(seed, position, start, BLOCK_SIZE, ROUNDS))
            better = races & (score > best)
            best = tl.where(better, score, best)
            token = tl.where(better, cols, token)
            greater += tl.where(races, mass, 0.0)
    winner = tl.min(tl.where(best == tl.max(best, 0), token, n_cols), 0)
    unusable = (tl.max(broken, 0) > 0) | (tl.min(ruled_out, 0) > 0)
    return winner, tl.sum(greater, 0), tl.sum(total, 0), unusable


@triton.jit
def _race_listed(x, cols, n_cols, seed, position, least, above, ROUNDS: tl.constexpr):
    """Run `_race` of the listed tokens `cols`, int32 [LISTED], whose logits are x, -inf beyond the list."""
    counts = (x >= least) & (cols < n_cols)
    races = counts & (x > above)
    unit = tl.where(above > float("-inf"), above, float("inf"))
    mass = tl.where(counts, tl.exp(x - unit), 0.0)
    a, b, c, d = _words(seed, position, (cols // 4).to(tl.uint32), ROUNDS)
    lane = cols % 4
    word = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
    score = tl.where(races, x - tl.log(_times(word)), float("-inf"))
    winner = tl.min(tl.where(score == tl.max(score, 0), cols, n_cols), 0)
    return winner, tl.sum(tl.where(races, mass, 0.0), 0), tl.sum(mass, 0)


@triton.jit
def _arrival_times(seed, position, start, BLOCK_SIZE: tl.constexpr, ROUNDS: tl.constexpr):
    """Return `philox.arrival_times` of BLOCK_SIZE tokens from `start` on: float32 [BLOCK_SIZE]."""
    group = (start // 4 + tl.arange(0, BLOCK_SIZE // 4)).to(tl.uint32)
    a, b, c, d = _words(seed, position, group, ROUNDS)
    return _times(tl.join(tl.join(a, c), tl.join(b, d)).reshape([BLOCK_SIZE]))


@triton.jit
def _words(seed, position, group, ROUNDS: tl.constexpr):
    """Return Philox's four words for groups of four tokens."""
    zero = tl.zeros_like(group)
    place = (position & 0xFFFFFFFF).to(tl.uint32) + zero
    return tl.philox(seed, group, place, zero, zero, ROUNDS)


@triton.jit
def _times(word):
    """Convert uniform words to exponential times."""
    v = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994039535522)
    series = v * (1 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return tl.where(v < 0.00390625, series, -tl.log(1 - v))
