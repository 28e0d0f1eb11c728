"""TokenBounds: what a body tells of a request's tokens before it is tokenized."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ADDED = 8
"""Maximum number of tokens that a tokenizer adds to a text, such as one for its beginning."""


@dataclass(frozen=True)
class TokenBounds:
    """The number of a request's sequences, and bounds on their tokens."""

    sequences: int
    characters: int
    """Characters of all its texts, and its token ids."""
    least_input: int
    """Minimum tokens of its longest prompt."""
    most_input: int | None
    """Maximum tokens of its longest prompt; None: a chat template may add any number."""
    most_output: int | None
    """Maximum output tokens; None: no limit of its own."""

    @staticmethod
    def of_prompts(
        prompts: Iterable[str | Sequence[int]], longest_token: int, n: int, most_output: int
    ) -> "TokenBounds":
        """Return the bounds of texts and token ids with `n` outputs each; every token has at least a byte."""
        sequences, characters, least, most = 0, 0, 0, 0
        for prompt in prompts:
            sequences, characters = sequences + n, characters + len(prompt)
            text = isinstance(prompt, str)
            least = max(least, -(-len(prompt) // longest_token) if text else len(prompt))
            most = max(most, len(prompt.encode(errors="replace")) + _ADDED if isinstance(prompt, str) else len(prompt))
        return TokenBounds(sequences, characters, least, most, most_output)
