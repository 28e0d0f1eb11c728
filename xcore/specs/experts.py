"""The experts of a mixture of experts: how many are read, and how unevenly tokens choose them."""

import functools
import math
from dataclasses import dataclass

from xcore.errors import InputError
from xcore.spec import Spec

_LEAST, _MOST, _FEW = 1.0, 0.8, (0.01, 2.0)
"""The range [1, 0.8 T] of experts' loads for T tokens, and the range where an expert sees less than one token."""


@dataclass(frozen=True)
class Experts(Spec):
    """The feed-forward networks of which a router chooses `per_token` for each token, in `layers` of the layers.

    The other layers have one feed-forward network of `ModelSpec.ffn`.
    """

    count: int
    """E."""
    per_token: int
    """k."""
    ffn: int
    """Width of one expert, m."""
    layers: int
    """Layers with experts."""
    shared_ffn: int = 0
    """Width of the expert that every token goes through, s; 0: none."""
    skew: float = 1.2
    """Exponent α of the power law of the experts' loads; 0: all experts are equally likely."""
    alone: bool = False
    """Whether only the experts have the weights' dtype if this has less than 16 bits; the rest then has 16."""
    biased: bool = False
    expert_parallel: bool = False
    """Whether each device of a tensor-parallel group has whole experts; otherwise it has a part of each, if it can."""
    attention_dp: int = 1
    """Devices that share the experts, while each has attention for its own sequences (attention data parallelism)."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise InputError(
                f"A mixture of experts has {self.count} experts, of which {self.per_token} for each token: choose at "
                "least one and at most all."
            )
        if self.attention_dp < 1 or self.count % self.attention_dp:
            raise InputError(
                f"{self.count} experts can't be shared evenly by {self.attention_dp} devices (attention data "
                "parallelism): choose a number of at least 1 that divides them."
            )
        if self.ffn < 1 or self.layers < 1 or self.shared_ffn < 0 or self.skew < 0:
            raise InputError(
                f"A mixture of experts has ffn {self.ffn}, layers {self.layers}, shared_ffn {self.shared_ffn} and skew "
                f"{self.skew:g}: ffn and layers must be at least 1, the others at least 0."
            )

    def distinct(self, tokens: float) -> float:
        """Return the expected number of experts that a batch reads: Σ (1 − (1 − p)^T) over the experts."""
        if tokens <= 0:
            return 0.0
        return sum(-math.expm1(tokens * math.log1p(-p)) if p < 1 else 1.0 for p in self._chances(tokens))

    def fullest(self, tokens: float, ranks: int) -> float:
        """Return the rows of the fullest of `ranks` equal groups of experts, over the mean of all groups.

        The experts with the most rows are dealt to the groups first, in alternating order, as engines do that balance
        their experts.
        """
        if ranks == 1:
            return 1.0
        sums = [0.0] * ranks
        for index, chance in enumerate(sorted(self._chances(tokens), reverse=True)):
            turn, place = divmod(index, ranks)
            sums[place if turn % 2 == 0 else ranks - 1 - place] += chance
        return max(sums) * ranks / self.per_token

    def ranks_of_token(self, ranks: int) -> float:
        """Return the expected number of devices, of `ranks`, that hold a token's experts if all are equally likely."""
        return ranks * (1.0 - (1.0 - 1.0 / ranks) ** self.per_token)

    def _chances(self, tokens: float) -> tuple[float, ...]:
        """Return for every expert the chance that a token chooses it; they add up to k."""
        return _chances(self.count, self.per_token, self.skew, 0.0 if tokens * self.per_token <= self.count else tokens)


@functools.lru_cache(maxsize=4096)
def _chances(count: int, per_token: int, skew: float, tokens: float) -> tuple[float, ...]:
    """Return the chances of experts whose loads follow a power law with exponent `skew`.

    The law is that of aiconfigurator's collector (ai-dynamo/aiconfigurator@095f58a, `collector/helper.py`): loads are
    x = ((b^(1−α) − a^(1−α)) u + a^(1−α))^(1/(1−α)) with u uniform, scaled to T k and limited to T. Here u takes the
    middles of E equal parts. `tokens` is 0 where the batch has less than one token an expert.
    """
    if skew == 0:
        return (per_token / count,) * count
    low, high = (_LEAST, max(_MOST * tokens, _LEAST)) if tokens else _FEW
    power = 1.0 - skew
    middles = ((i + 0.5) / count for i in range(count))
    if abs(power) < 1e-9:
        loads = [low * (high / low) ** u for u in middles]
    else:
        loads = [((high**power - low**power) * u + low**power) ** (1.0 / power) for u in middles]
    return _limited(loads, per_token)


def _limited(loads: list[float], per_token: int) -> tuple[float, ...]:
    """Scale loads to chances that add up to k, none above 1."""
    full = 0
    ordered = sorted(loads, reverse=True)
    while full < per_token and ordered[full] * (per_token - full) > sum(ordered[full:]):
        full += 1
    rest = sum(ordered[full:])
    return (1.0,) * full + tuple(load * (per_token - full) / rest for load in ordered[full:])
