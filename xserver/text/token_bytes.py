"""Token bytes: the bytes of each token, for tokenizers with byte-level vocabularies or byte fallback."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_BYTE_TOKEN = len("<0x00>")
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""Letters of byte-level vocabularies and their bytes: printable Latin-1 stands for itself, the others follow."""


class TokenBytes:
    """The bytes that tokens stand for, by their tokenizer's decoder.

    All tokens of a byte-level tokenizer stand for bytes. With byte fallback, tokens such as `<0xE4>` do.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        self.tokenizer = tokenizer
        decoder = tokenizer.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": ""}
        kinds = [part["type"] for part in state.get("decoders", [state])]
        self.byte_level = "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}
        """Whether all tokens are bytes."""
        self._fallback = "ByteFallback" in kinds
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        self._known: dict[int, bytes | None] = {}
        space = tokenizer.token_to_id("<0x20>")
        self.strips_space = self._fallback and space is not None and not self.decode([space])
        """Whether a space that begins the whole text is removed."""

    def get(self, token: int) -> bytes | None:
        """Return the token's bytes; empty for special tokens and ids beyond the tokenizer.

        None if the token's text depends on the preceding tokens.
        """
        if token not in self._known:
            self._known[token] = self._bytes_of(self.tokenizer.id_to_token(token))
        return self._known[token]

    def special(self, token: int) -> str:
        """Return the name of a special token; empty for any other."""
        name = self.tokenizer.id_to_token(token)
        return name if name in self._special else ""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the tokenizer's own text of tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def _bytes_of(self, name: str | None) -> bytes | None:
        if name is None or name in self._special:
            return b""
        if self.byte_level:
            letters = [_BYTES.get(letter) for letter in name]
            return bytes(byte for byte in letters if byte is not None) if None not in letters else name.encode()
        if self._fallback and len(name) == _BYTE_TOKEN and name.startswith("<0x") and name.endswith(">"):
            try:
                return bytes([int(name[3:5], 16)])
            except ValueError:
                return None
        return None
