"""Sampling on the CPU, compiled by numba: `sampling.sample_reference` without sorting.

The greatest logit of every chunk of a row shows where to search: few chunks hold the k greatest, or the mass that
remains without negligible logits. Random times of few tokens are computed one by one, those of many eight at a time.
"""

import numpy as np
from numba import prange

from exegpt.kernels.argmax import NO_TOKEN, place_of_greatest
from exegpt.kernels.exponential import exp, mass_of
from exegpt.kernels.greatest import greatest
from exegpt.kernels.numba_jit import njit
from exegpt.kernels.philox import MOST, MULTIPLIERS, ROUNDS, SERIES_BELOW, WEYL

_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_W0, _W1 = (np.uint64(w) for w in WEYL)
_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_SCALE, _SHIFT, _MOST32 = np.float32(2.0**-32), np.float32(2.0**-33), np.float32(MOST)
_GROUPS = 256
_CHUNK = 64
"""Number of logits in a chunk, of which the greatest is kept."""
_FEW = 8
"""Below this share of the vocabulary, tokens are drawn one by one: eight at a time take as long as one."""
_LOWEST = np.float32(np.finfo(np.float32).min)
"""Below all logits except minus infinity, which is never drawn."""
_MARGIN = np.float32(1 + 1e-4)
"""More than the relative error of `exponential.exp`."""


@njit(error_model="numpy")
def _uniform(seed, position, first, out):  # type: ignore[no-untyped-def]
    """Write the uniform values v of `arrival_times` to `out` [4, groups], from group `first` on.

    out[j, g] belongs to token 4 · (first + g) + j. The loops let LLVM compute several groups at a time.
    """
    for g in range(out.shape[1]):
        k0, k1 = np.uint64(seed) & _MASK, np.uint64(seed) >> _HALF
        c0, c1, c2, c3 = np.uint64(first + g), np.uint64(position) & _MASK, np.uint64(0), np.uint64(0)
        for _ in range(ROUNDS):
            a, b = c0 * _M0, c2 * _M1
            c0, c1, c2, c3 = (b >> _HALF) ^ c1 ^ k0, b & _MASK, (a >> _HALF) ^ c3 ^ k1, a & _MASK
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
        out[0, g] = min(np.float32(c0) * _SCALE + _SHIFT, _MOST32)
        out[1, g] = min(np.float32(c1) * _SCALE + _SHIFT, _MOST32)
        out[2, g] = min(np.float32(c2) * _SCALE + _SHIFT, _MOST32)
        out[3, g] = min(np.float32(c3) * _SCALE + _SHIFT, _MOST32)


@njit(error_model="numpy")
def _arrival_time(v):  # type: ignore[no-untyped-def]
    if v < np.float32(SERIES_BELOW):
        third, quarter = np.float32(1 / 3), np.float32(1 / 4)
        return v * (np.float32(1) + v * (np.float32(1 / 2) + v * (third + v * quarter)))
    return -np.log(np.float32(1) - v)


@njit(error_model="numpy")
def _draw(x, least, seed, position):  # type: ignore[no-untyped-def]
    """Return the token that arrives first, among tokens of x whose logit is at least `least`."""
    v = np.empty((4, _GROUPS), np.float32)
    best, token = np.float32(-np.inf), 0
    for first in range(0, len(x), 4 * _GROUPS):
        _uniform(seed, position, first // 4, v)
        for t in range(first, min(first + 4 * _GROUPS, len(x))):
            # The time is above v: most tokens are too late whatever its logarithm is.
            if x[t] >= least and v[t & 3, (t - first) >> 2] < exp(x[t] - best) * _MARGIN:
                score = x[t] - np.log(_arrival_time(v[t & 3, (t - first) >> 2]))
                if score > best:
                    best, token = score, t
    return token


@njit(error_model="numpy")
def _draw_of(x, places, seed, position):  # type: ignore[no-untyped-def]
    """Return the result of `_draw` for a few tokens."""
    v = np.empty((4, 1), np.float32)
    best, token = np.float32(-np.inf), 0
    for t in places:
        _uniform(seed, position, t // 4, v)
        score = x[t] - np.log(_arrival_time(v[t & 3, 0]))
        if score > best:
            best, token = score, t
    return token


@njit(error_model="numpy")
def _chunk_tops(x):  # type: ignore[no-untyped-def]
    """Return the greatest value of each chunk of x."""
    tops = np.empty(-(-len(x) // _CHUNK), np.float32)
    for chunk in range(len(tops)):
        tops[chunk] = greatest(x[chunk * _CHUNK : (chunk + 1) * _CHUNK])
    return tops


@njit(error_model="numpy")
def _places(x, tops, least):  # type: ignore[no-untyped-def]
    """Return where x is at least `least`; only chunks whose greatest value reaches `least` are searched."""
    places, count = np.empty(len(x), np.int32), 0
    for chunk in range(len(tops)):
        if tops[chunk] >= least:
            for place in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, len(x))):
                if x[place] >= least:
                    places[count] = place
                    count += 1
    return places[:count]


@njit(error_model="numpy")
def _kth_greatest(x, tops, k):  # type: ignore[no-untyped-def]
    """Return the k-th greatest value of x, or its least finite one.

    At least k chunks have a value that is no less than the k-th of their tops.
    """
    bound = np.sort(tops)[len(tops) - k] if k <= len(tops) else _LOWEST
    return _least_kept(x[_places(x, tops, max(bound, _LOWEST))], k, 0.0)


@njit(error_model="numpy")
def _least_kept(values, k, wanted):  # type: ignore[no-untyped-def]
    """Return the greatest threshold that leaves at least k values and the mass `wanted`.

    If there is none, return the least value. Masses are relative to that of the greatest value. The search bisects
    between values, and looks only at undecided ones.
    """
    low, high = values.min(), values.max()
    top = high
    above, mass_above = 0, np.float64(0)
    while low < high:
        pivot = low + (high - low) * np.float32(0.5)
        if not pivot > low:
            pivot = high
        kept = values[values >= pivot]
        mass = mass_above + mass_of(kept, top)
        if above + len(kept) >= k and mass >= wanted:
            values, low = kept, kept.min()
        else:
            values = values[values < pivot]
            above, mass_above, high = above + len(kept), mass, values.max()
    return low


@njit(error_model="numpy")
def _least_of_share(x, tops, least, share):  # type: ignore[no-untyped-def]
    """Return the greatest threshold that leaves at least the share `share` of the mass.

    The mass is that of the values that are at least `least`.
    """
    top = greatest(tops)
    values = x if least == _LOWEST else x[_places(x, tops, least)]
    mass = mass_of(values, top)
    # All values below this together have no more mass than is left out, rounded or not.
    negligible = top + np.float32(np.log(0.99 * (1 - share) * mass / len(values)))
    return _least_kept(x[_places(x, tops, max(least, negligible))], 0, share * mass)


@njit(
    [
        "void(float32[:, ::1], float32[::1], int32[::1], float32[::1], float32[::1], float32[::1], int64[::1],"
        " int64[::1], int64[::1], uint8[:, ::1], int64[::1])"
    ],
    parallel=True,
    cache=True,
    error_model="numpy",
)
def sample_rows(logits, temperature, top_k, top_p, log_min_p, penalty, seed, position, slot, seen, out):  # type: ignore[no-untyped-def]
    """Write the next token of every row of logits [rows, vocab], or `NO_TOKEN`, to out [rows].

    The other arguments are `sampling.Sampling`'s arrays; log_min_p is [0] if no row has one.
    """
    vocab = logits.shape[1]
    for row in prange(len(logits)):
        x = logits[row]
        if penalty[row] != 1:
            x = x.copy()
            has = seen[slot[row]]
            for token in range(vocab):
                if has[token]:
                    x[token] = x[token] * penalty[row] if x[token] < 0 else x[token] / penalty[row]
        if temperature[row] == 0:
            out[row] = place_of_greatest(x)
            continue
        x = x / temperature[row]
        tops, least = _chunk_tops(x), _LOWEST
        if not np.isfinite(greatest(tops)):
            out[row] = NO_TOKEN
            continue
        if 0 < top_k[row] < vocab:
            least = _kth_greatest(x, tops, top_k[row])
        if len(log_min_p):
            least = max(least, greatest(tops) + log_min_p[row])
        if top_p[row] < 1:
            least = _least_of_share(x, tops, least, top_p[row])
        if least > _LOWEST:
            places = _places(x, tops, least)
            if len(places) < vocab // _FEW:
                out[row] = _draw_of(x, places, seed[row], position[row])
                continue
        out[row] = _draw(x, least, seed[row], position[row])
