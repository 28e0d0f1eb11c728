"""Philox: random times that depend only on a row's seed, a position and a token.

The number of token t is word t mod 4 of Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"),
with the row's seed as key and (t // 4, position, 0, 0) as counter.
"""

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""Philox's constants."""
ROUNDS = 10
_LOW = 0xFFFFFFFF
SERIES_BELOW = 2.0**-8
"""Below this v, -log(1 - v) is computed by its series: 1 - v would round v away."""
MOST = 1 - 2.0**-24


def arrival_times(seed: torch.Tensor, position: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return exponential times of mean 1 of every row's tokens: float32 [rows, vocab].

    Seed and position are int64 [rows].
    """
    groups = torch.arange(-(-vocab // 4), device=seed.device).expand(len(seed), -1)
    zero = torch.zeros_like(groups)
    words = philox(seed.unsqueeze(1), groups, position.unsqueeze(1) & _LOW, zero, zero)
    v = torch.stack(words, 2).flatten(1)[:, :vocab].float() * 2.0**-32 + 2.0**-33
    v = v.clamp(max=MOST)
    return torch.where(v < SERIES_BELOW, v * (1 + v * (1 / 2 + v * (1 / 3 + v / 4))), -(1 - v).log())


def philox(
    seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute Philox-4x32-10 of a 64-bit key and a counter of four 32-bit words: four words below 2^32.

    All are int64.
    """
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        # A product of 64 bits overflows into int64's sign, which the masks remove.
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((b >> 32) & _LOW) ^ c1 ^ k0, b & _LOW, ((a >> 32) & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3
