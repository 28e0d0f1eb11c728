"""Windows of some layers of a model: what their tokens see, and what they keep in the cache."""

from dataclasses import dataclass
from typing import Literal

from xcore.errors import InputError
from xcore.spec import Spec


def seen_within(new: float, past: float, size: float) -> float:
    """Return the sum of the tokens that each of `new` tokens after `past` sees within a window of `size` tokens."""
    within = min(max(size - past, 0.0), new)  # those whose window reaches back to the first token
    return within * past + within * (within + 1) / 2 + ((new - within) * size if new > within else 0.0)


@dataclass(frozen=True)
class Windows(Spec):
    """The layers that see only a part of the earlier tokens; the other layers see all."""

    size: int
    layers: int
    kind: Literal["sliding", "chunks"] = "sliding"
    """`chunks`: a token sees only the tokens since the last multiple of `size`."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.layers < 1:
            raise InputError(f"Windows of {self.size} tokens in {self.layers} layers: both must be at least 1.")

    def seen(self, new: float, past: float) -> float:
        """Return the sum of the tokens that each of `new` tokens after `past` sees."""
        if self.kind == "sliding":
            return seen_within(new, past, self.size)
        if past >= self.size:
            return new * (self.size + 1) / 2  # the mean over positions
        return self._seen_to(past + new) - self._seen_to(past)

    def _seen_to(self, position: float) -> float:
        whole, rest = divmod(position, self.size)
        return (whole * self.size * (self.size + 1) + rest * (rest + 1)) / 2

    def read(self, past: float) -> float:
        """Return the cached tokens that a new token after `past` reads."""
        if self.kind == "chunks" and past >= self.size:
            return (self.size - 1) / 2  # the mean over positions
        return min(past, self.size - 1)

    def kept(self, tokens: float) -> float:
        """Return the tokens of a sequence of `tokens` that stay in the cache."""
        return min(tokens, self.size)
