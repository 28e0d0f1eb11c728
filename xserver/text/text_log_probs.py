"""Log-probabilities for clients, with the tokens' texts, in the formats of both APIs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from xcore.requests.engine_protocol import TokenLogProb
from xserver.text.output_text import OutputText
from xserver.text.token_bytes import TokenBytes

_ALL = range(2**31)
"""All tokens."""


@dataclass(frozen=True)
class TextLogProb:
    """A token's log-probability, with the bytes of its text after the preceding tokens."""

    data: bytes
    logprob: float | None
    """None for the first token, which has no predecessors."""
    likeliest: tuple[tuple[bytes, float], ...]
    offset: int = 0
    """Start of its text in the choice's text, in code points."""

    @staticmethod
    def of(text: OutputText, token: int, logprob: TokenLogProb) -> "TextLogProb":
        """Return the log-probability of the next token of a text."""
        own, likeliest = logprob
        return TextLogProb(text.shown(token), own, tuple((text.shown(i), value) for i, value in likeliest))

    def placed(self, begin: int, made: str) -> "TextLogProb":
        """Return the entry with its place, if the token has completed the text `made`, which begins at `begin`.

        The place is the start of the token's own text at the end of `made`; for a token that is a part of a character,
        `begin`.
        """
        own = _text(self.data)
        return replace(self, offset=begin + (len(made) - len(own) if made.endswith(own) else 0))


@dataclass(frozen=True)
class PromptText:
    """The text of a prompt for its echo."""

    text: str
    spans: tuple[tuple[int, int], ...] | None
    """The position of each token in the text by the tokenizer; None: the text was made from the tokens."""

    @staticmethod
    def of(token_bytes: TokenBytes, tokens: Sequence[int]) -> "PromptText":
        """Return the text of a prompt that came as tokens, with the names of special tokens."""
        text = OutputText(token_bytes, (), named=_ALL)
        return PromptText(text.push(tokens) + text.finish(), None)

    def logprobs(
        self, token_bytes: TokenBytes, tokens: Sequence[int], logprobs: Sequence[TokenLogProb]
    ) -> list[TextLogProb]:
        """Return the log-probabilities of its tokens, with their places in the text."""
        text = OutputText(token_bytes, (), named=_ALL)
        entries, offset = [], 0
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            entry, made = TextLogProb.of(text, token, logprob), text.push([token])
            if self.spans is None:
                entries.append(entry.placed(offset, made))
                offset += len(made)
                continue
            own, (begin, end) = _text(entry.data), self.spans[place]
            if "\ufffd" not in own and self.text.startswith(own, offset):
                begin, end = offset, offset + len(own)  # a span may leave out the space before a word
            entries.append(replace(entry, offset=begin if end > begin else offset))  # no span: the tokenizer added it
            offset = max(offset, end)
        return entries


def content_logprobs(entries: Iterable[TextLogProb]) -> list[dict[str, object]]:
    """Return the log-probabilities of a message's tokens."""

    def document(data: bytes, logprob: float | None) -> dict[str, object]:
        return {"token": _text(data), "logprob": logprob, "bytes": list(data)}

    return [
        document(entry.data, entry.logprob) | {"top_logprobs": [document(*pair) for pair in entry.likeliest]}
        for entry in entries
    ]


def chat_logprobs(entries: Iterable[TextLogProb]) -> dict[str, object]:
    """Return the `logprobs` of a chat completion's choice."""
    return {"content": content_logprobs(entries), "refusal": None}


def completion_logprobs(entries: Sequence[TextLogProb]) -> dict[str, object]:
    """Return the `logprobs` of a completion's choice.

    If tokens have the same text, the map keeps the likeliest of them. It also has the sampled token.
    """
    return {
        "tokens": [_text(entry.data) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_map(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _map(entry: TextLogProb) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    values: dict[str, float] = {}
    for data, logprob in (*entry.likeliest, (entry.data, entry.logprob)):
        text = _text(data)
        values[text] = max(logprob, values.get(text, logprob))
    return values


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
