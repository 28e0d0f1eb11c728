"""Sampling: temperature, top-k, top-p, repetition penalty, and chance that depends on nothing but a row's own seed.

A token is drawn by a race: token t arrives after an exponential time divided by its probability, and the first one
wins. Its time comes from word t mod 4 of Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")
with the row's seed as key and (t // 4, position, 0, 0) as counter. So a row's token is the same in whatever batch it
is, on whatever device, up to the rounding of logits that are nearly as good.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit, prange

from exegpt.kernels import device
from exegpt.kernels.exponential import exp
from exegpt.kernels.greatest import greatest
from exegpt.kernels.threads import follow_torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""Philox's constants."""
ROUNDS = 10
_LOW = 0xFFFFFFFF
_NEAR = 2.0**-8
"""Below this, -log(1 - v) is taken by its series: 1 - v would round v away."""
_MOST = 1 - 2.0**-24


@dataclass(frozen=True)
class Sampling:
    """How each row's token is chosen: tensors of one element per row, on the logits' device."""

    temperature: torch.Tensor
    """float32: logits are divided by it; 0 takes the greatest, the first of equals."""
    top_k: torch.Tensor
    """int32: only so many of the greatest logits, and those equal to the last of them; 0 for all."""
    top_p: torch.Tensor
    """float32: of those, only the likeliest that together have this share of their probability; 1 for all."""
    penalty: torch.Tensor
    """float32: repetition penalty, which positive logits of tokens in `history` are divided by and negative ones
    multiplied; 1 for none."""
    seed: torch.Tensor
    """int64"""
    position: torch.Tensor
    """int64: the place of the token to come in its sequence, modulo 2^32: another one at another place."""
    history: torch.Tensor
    """int64 [rows, most]: the row's tokens so far, filled up with -1."""


def sample(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Every row's next token: logits [rows, vocab] → int64 [rows]."""
    if device.on_gpu(logits):
        from exegpt.kernels.sampling_gpu import sample_gpu

        return sample_gpu(logits, sampling)
    out = torch.empty(len(logits), dtype=torch.int64)
    follow_torch()
    s = sampling
    rows = (s.temperature, s.top_k, s.top_p, s.penalty, s.seed, s.position, s.history)
    _sample(logits.float().contiguous().numpy(), *(t.contiguous().numpy() for t in rows), out.numpy())
    return out


def sample_reference(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """`sample` in plain PyTorch, by sorting."""
    rows, vocab = logits.shape
    x = logits.float()
    held = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=x.device)
    held.scatter_(1, sampling.history.where(sampling.history >= 0, vocab), True)
    penalty = sampling.penalty.unsqueeze(1)
    x = torch.where(held[:, :vocab], torch.where(x < 0, x * penalty, x / penalty), x)
    greedy = sampling.temperature == 0
    x = x / sampling.temperature.where(~greedy, 1).unsqueeze(1)

    best = x.sort(dim=1, descending=True).values
    k = sampling.top_k.long().where((sampling.top_k > 0) & (sampling.top_k < vocab), vocab)
    kept = best >= best.gather(1, k.unsqueeze(1) - 1)
    mass = (best - best[:, :1]).exp() * kept
    before = mass.cumsum(1) - mass
    wanted = sampling.top_p.unsqueeze(1) * mass.sum(1, keepdim=True)
    kept &= (before < wanted) | (sampling.top_p >= 1).unsqueeze(1)
    kept[:, 0] = True
    least = best.where(kept, math.inf).amin(1, keepdim=True)

    times = arrival_times(sampling.seed, sampling.position, vocab)
    drawn = (x - times.log()).where(x >= least, -math.inf)
    return x.where(greedy.unsqueeze(1), drawn).argmax(1)


def arrival_times(seed: torch.Tensor, position: torch.Tensor, vocab: int) -> torch.Tensor:
    """Exponential times of mean 1 of every row's tokens, seed and position int64 [rows]: float32 [rows, vocab]."""
    groups = torch.arange(-(-vocab // 4), device=seed.device).expand(len(seed), -1)
    zero = torch.zeros_like(groups)
    words = philox(seed.unsqueeze(1), groups, position.unsqueeze(1) & _LOW, zero, zero)
    v = torch.stack(words, 2).flatten(1)[:, :vocab].float() * 2.0**-32 + 2.0**-33
    v = v.clamp(max=_MOST)
    return torch.where(v < _NEAR, v * (1 + v * (1 / 2 + v * (1 / 3 + v / 4))), -(1 - v).log())


def philox(
    seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox-4x32-10 of a 64-bit key and a counter of four 32-bit words, all as int64: four words below 2^32."""
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        # A product of 64 bits wraps round into int64's sign, which the masks take off.
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((b >> 32) & _LOW) ^ c1 ^ k0, b & _LOW, ((a >> 32) & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_W0, _W1 = (np.uint64(w) for w in WEYL)
_MASK, _HALF = np.uint64(_LOW), np.uint64(32)
_SCALE, _SHIFT, _MOST32 = np.float32(2.0**-32), np.float32(2.0**-33), np.float32(_MOST)
_GROUPS = 256
_MARGIN = np.float32(1 + 1e-4)
"""More than the relative error of `exponential.exp`."""


@njit(error_model="numpy")
def _uniform(seed, position, first, out):  # type: ignore[no-untyped-def]
    """The v of `arrival_times` of four times as many tokens as out's rows are long, from group `first` on: out[j, g] is
    token 4 · (first + g) + j's. Written so that LLVM takes several groups at a time."""
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
    if v < np.float32(_NEAR):
        third, quarter = np.float32(1 / 3), np.float32(1 / 4)
        return v * (np.float32(1) + v * (np.float32(1 / 2) + v * (third + v * quarter)))
    return -np.log(np.float32(1) - v)


@njit(error_model="numpy")
def _draw(x, least, seed, position):  # type: ignore[no-untyped-def]
    """The token of x, from `least` on, that arrives first."""
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
def _least_kept(x, top, least, k, wanted):  # type: ignore[no-untyped-def]
    """The greatest of x for which it and all above are at least k and have the mass `wanted`, in units of `top`'s.

    By bisection between values of x, of which only those that are still in question are looked at; `least` is known to
    do.
    """
    open_values = x[(x >= least) & (x <= top)]
    low, high = least, top
    above, mass_above = 0, np.float64(0)
    while low < high:
        pivot = low + (high - low) * np.float32(0.5)
        if not pivot > low:
            pivot = high
        kept = open_values[open_values >= pivot]
        mass = mass_above
        for value in kept:
            mass += exp(value - top)
        if above + len(kept) >= k and mass >= wanted:
            open_values, low = kept, kept.min()
        else:
            open_values = open_values[open_values < pivot]
            above, mass_above, high = above + len(kept), mass, open_values.max()
    return low


@njit(error_model="numpy")
def _mass(x, top, least):  # type: ignore[no-untyped-def]
    total = np.float64(0)
    for value in x[x >= least]:
        total += exp(value - top)
    return total


@njit(
    [
        "void(float32[:, ::1], float32[::1], int32[::1], float32[::1], float32[::1], int64[::1], int64[::1],"
        " int64[:, ::1], int64[::1])"
    ],
    parallel=True,
    cache=True,
    error_model="numpy",
)
def _sample(logits, temperature, top_k, top_p, penalty, seed, position, history, out):  # type: ignore[no-untyped-def]
    vocab = logits.shape[1]
    for row in prange(len(logits)):
        x = logits[row].copy()
        for token in history[row]:
            if token >= 0:
                value = logits[row, token]
                x[token] = value * penalty[row] if value < 0 else value / penalty[row]
        if temperature[row] == 0:
            out[row] = np.argmax(x)
            continue
        x /= temperature[row]
        top, least = greatest(x), -greatest(-x)
        if least == -np.inf and top > least:
            least = x[x > -np.inf].min()
        if 0 < top_k[row] < vocab:
            least = _least_kept(x, top, least, top_k[row], 0.0)
        if top_p[row] < 1:
            least = _least_kept(x, top, least, 0, top_p[row] * _mass(x, top, least))
        out[row] = _draw(x, least, seed[row], position[row])
