"""Speculation: draft tokens per decode iteration, how many of them are accepted, and what drafts them.

A decode iteration verifies γ draft tokens of each sequence and gives the accepted ones, in order up to the first
rejected one, and one more token of the model itself (Leviathan et al., 2023). So it gives 1 to γ + 1 tokens.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from xcore.arrays import Array, Integers
from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.model import ModelSpec

MOST_DRAFTED = 16
"""Most draft tokens per iteration."""
EXACT = 256
"""Tokens up to which the distribution of the iterations is exact; beyond them, the central limit theorem holds."""


@dataclass(frozen=True)
class Speculation(Spec):
    """Speculative decoding with γ draft tokens in every decode iteration."""

    acceptance: tuple[float, ...]
    """For i = 1..γ, the probability that the first i draft tokens are all accepted; falling."""
    layers: float = 1.0
    """Layers of the model that draft (an MTP or EAGLE head), in decoder layers of the model; 0 with `draft`."""
    draft: ModelSpec | None = None
    """A separate draft model; None: the `layers` draft."""

    def __post_init__(self) -> None:
        rates = np.array([1.0, *self.acceptance])
        if not 1 <= len(self.acceptance) <= MOST_DRAFTED:
            raise InputError(f"Speculation has {len(self.acceptance)} draft tokens: it must have 1 to {MOST_DRAFTED}.")
        if not (np.diff(rates) <= 1e-9).all() or not 0 <= rates[-1] <= rates[1] <= 1:
            raise InputError(
                f"The acceptance {list(self.acceptance)} is impossible: the probabilities that the first 1, 2, ... "
                "draft tokens are accepted must be from 0 to 1 and fall."
            )
        if not 0 <= self.layers <= 1000 or (self.draft is None) == (self.layers == 0):
            raise InputError(
                f"Speculation has {self.layers:g} drafting layers and "
                f"{f'the draft model {self.draft.name}' if self.draft else 'no draft model'}: it needs one of the two."
            )

    @property
    def drafted(self) -> int:
        """Return γ, the draft tokens per iteration."""
        return len(self.acceptance)

    @property
    def rows(self) -> int:
        """Return γ + 1, the tokens of a sequence that an iteration computes."""
        return len(self.acceptance) + 1

    @functools.cached_property
    def tokens_per_step(self) -> float:
        """Return τ, the mean tokens that an iteration gives a sequence."""
        return 1.0 + sum(self.acceptance)

    @functools.cached_property
    def chances(self) -> Array:
        """Return the probabilities that an iteration gives 1, 2, ... γ + 1 tokens, float64 [γ + 1]."""
        return -np.diff([1.0, *self.acceptance, 0.0])

    @functools.cached_property
    def unfinished(self) -> Array:
        """Return the probability that n iterations give fewer than L tokens, float64 [n, L], both up to `EXACT`."""
        fewer = np.zeros((EXACT + 1, EXACT + 1))
        fewer[0, 1:] = 1.0
        for n in range(1, EXACT + 1):
            for given, p in enumerate(self.chances, 1):
                fewer[n, given:] += p * fewer[n - 1, :-given]
        return fewer

    @functools.cached_property
    def _variance(self) -> float:
        """Return the variance of the iterations per token, for many tokens."""
        given = np.arange(1.0, self.rows + 1)
        return float((given - self.tokens_per_step) ** 2 @ self.chances) / self.tokens_per_step**3

    @functools.cached_property
    def _moments(self) -> tuple[Array, Array, Array]:
        """Return numbers of tokens, and the mean and the variance of the iterations that give them."""
        known, mean = np.arange(EXACT + 1.0), self.unfinished.sum(axis=0)
        return known, mean, (2 * known + 1) @ self.unfinished - mean**2

    def iterations(self, tokens: ArrayLike) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of the iterations that give at least `tokens` tokens."""
        (known, mean, variance), wanted = self._moments, np.asarray(tokens, dtype=np.float64)
        beyond = np.maximum(wanted - EXACT, 0.0)
        means = np.interp(wanted, known, mean) + beyond / self.tokens_per_step
        variances = np.interp(wanted, known, variance) + beyond * self._variance
        return means, np.sqrt(np.maximum(variances, 0.0))

    def draw(self, tokens: ArrayLike, rng: np.random.Generator) -> Integers:
        """Draw the iterations that give at least `tokens` tokens each, int64 of the same shape."""
        left = np.asarray(tokens, dtype=np.float64).ravel()
        mean, deviation = self.iterations(left)
        count = np.maximum(np.floor(mean - 8.0 * deviation - self.rows), 0.0).astype(np.int64)  # surely not enough yet
        left = left - rng.multinomial(count, self.chances) @ np.arange(1.0, self.rows + 1)
        while (left > 0).any():
            going = np.flatnonzero(left > 0)
            left[going] -= 1.0 + np.searchsorted(np.cumsum(self.chances)[:-1], rng.random(len(going)), side="right")
            count[going] += 1
        return count.reshape(np.shape(tokens))


def check_drafting(model: ModelSpec) -> None:
    """Raise InputError for a model whose decode iterations can't verify draft tokens."""
    if model.encoder_layers:
        raise InputError(
            f"Speculative decoding needs a decoder-only model, but '{model.name}' has an encoder: leave "
            "--draft-acceptance out."
        )
