"""Acceptance: how likely draft tokens are accepted, by the number of draft tokens in an iteration.

It is read from a rate, from rates by position, or from a file with measured acceptance lengths.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.specs.speculation import MOST_DRAFTED


@dataclass(frozen=True)
class Acceptance:
    """The probabilities that the first 1, 2, ... draft tokens are all accepted, by the number of draft tokens."""

    by_length: Mapping[int, tuple[float, ...]]
    text: str
    """The option's value from which they were read."""

    @staticmethod
    def parse(text: str) -> "Acceptance":
        """Read `0.7`, `0.8,0.6,0.5` (by position) or a YAML file; InputError for anything else.

        A rate is that of each draft token if all before it are accepted. The rates by position are those of engines'
        logs: the shares of the iterations that accept the first, the second, ... draft token.
        """
        numbers = _numbers(text)
        if len(numbers) == 1:
            rate = numbers[0]
            if not 0 <= rate <= 1:
                raise InputError(f"--draft-acceptance {text}: a rate must be from 0 to 1.")
            counts = range(1, MOST_DRAFTED + 1)
            return Acceptance({n: tuple(rate**i for i in range(1, n + 1)) for n in counts}, text)
        if numbers:
            falling = all(a >= b for a, b in zip((1.0, *numbers), (*numbers, 0.0), strict=True))
            if not falling or len(numbers) > MOST_DRAFTED:
                raise InputError(
                    f"--draft-acceptance {text}: the rates by position must be from 0 to 1 and fall, at most "
                    f"{MOST_DRAFTED} of them."
                )
            return Acceptance({n: tuple(numbers[:n]) for n in range(1, len(numbers) + 1)}, text)
        return _from_file(text)

    @property
    def longest(self) -> int:
        """Return the most draft tokens whose acceptance is known."""
        return max(self.by_length)

    def at(self, drafted: int) -> tuple[float, ...]:
        """Return the probabilities with this number of draft tokens; InputError if they are unknown."""
        if drafted not in self.by_length:
            known = ", ".join(map(str, self.by_length))
            raise InputError(
                f"--draft-acceptance {self.text} says nothing about {drafted} draft tokens: it has {known}."
            )
        return self.by_length[drafted]


def _numbers(text: str) -> list[float]:
    """Return the numbers that a text lists; none if it is something else."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return []


def _from_file(text: str) -> Acceptance:
    """Read mean tokens per iteration by the number of draft tokens from a YAML file, as `FILE` or `FILE:NAME`.

    NAME selects one of several curves by any of the keys above it.
    """
    from xcore.document import read_yaml

    if "," in text and not Path(text).exists():
        raise InputError(
            f"--draft-acceptance {text}: write a rate like 0.7, rates by position like 0.8,0.6, or a file."
        )
    path, name = (text, "") if Path(text).exists() else (text.rpartition(":")[0] or text, text.rpartition(":")[2])
    curves = [(keys, curve) for keys, curve in _curves(read_yaml(Path(path), "acceptance"), ())]
    chosen = [curve for keys, curve in curves if not name or name in keys]
    if len(chosen) != 1:
        names = ", ".join("/".join(keys) for keys, _ in curves) or "none"
        raise InputError(
            f"'{path}' has {len(chosen)} curves of acceptance lengths{f' named {name}' if name else ''}: pass "
            f"--draft-acceptance {path}:NAME with one of {names}."
        )
    return Acceptance(_by_length(chosen[0], path), text)


def _curves(value: object, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[int, float]]]:
    """Yield the groups whose keys are all numbers of draft tokens, with the keys above them."""
    if not isinstance(value, dict) or not value:
        return
    if all(type(key) is int and type(of) in (int, float) for key, of in value.items()):
        yield keys, {key: float(of) for key, of in value.items()}
    for key, inner in value.items():
        yield from _curves(inner, (*keys, str(key)))


def _by_length(curve: dict[int, float], path: str) -> dict[int, tuple[float, ...]]:
    for drafted, mean in curve.items():
        if not 1 <= drafted <= MOST_DRAFTED or not 1 <= mean <= drafted + 1:
            raise InputError(
                f"'{path}' has {mean:g} tokens per iteration with {drafted} draft tokens: it must have 1 to "
                f"{drafted + 1} tokens, for 1 to {MOST_DRAFTED} draft tokens."
            )
    known = np.array([0, *sorted(curve)]), np.array([1.0, *(curve[n] for n in sorted(curve))])
    return {n: _rates(np.diff(np.interp(np.arange(n + 1), *known)), curve[n] - 1.0) for n in sorted(curve)}


def _rates(gains: Array, accepted: float) -> tuple[float, ...]:
    """Return falling rates by position near the `gains` of each draft token, which sum to `accepted`.

    Measured gains needn't fall: each length is a run of its own. Where one draft token more gains more than the one
    before, or less than nothing, the rates before it are scaled.
    """
    falling = np.minimum.accumulate(np.clip(gains, 0.0, 1.0))
    low, high = 0.0, len(gains) / max(float(falling.sum()), 1e-9) + 1.0
    if not falling.any():
        falling, high = np.ones(len(gains)), 1.0
    for _ in range(60):  # the sum rises with the factor
        factor = (low + high) / 2
        low, high = (factor, high) if np.minimum(factor * falling, 1.0).sum() < accepted else (low, factor)
    return tuple(np.minimum(high * falling, 1.0).tolist())
