"""A model's tokenizer, read from its tokenizer.json so that every text keeps all of its tokens and gets no others."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xcore.document import read_json
from xcore.errors import refusing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"


def load_tokenizer(directory: Path) -> "Tokenizer | None":
    """Load the model's tokenizer (`tokenizers.Tokenizer`); None if it has none.

    The file may truncate and pad texts to a length, as training does; both are switched off.
    """
    path = directory / TOKENIZER
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    with refusing(f"'{path}' is not a tokenizer"), _without_panics():
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    _add_tokens(tokenizer, directory)
    return tokenizer


def _add_tokens(tokenizer: "Tokenizer", directory: Path) -> None:
    """Add the tokens that only the files beside tokenizer.json have, as transformers does.

    The files are `tokenizer_config.json`, with `added_tokens_decoder` and the special tokens, and `added_tokens.json`.

    Raises:
        InputError: A file has another form.
    """
    from tokenizers import AddedToken

    paths = directory / "tokenizer_config.json", directory / "added_tokens.json"
    config, added = (read_json(path) if path.is_file() else {} for path in paths)
    with refusing(f"the added tokens in '{paths[0]}' or '{paths[1].name}' can't be read"):
        decoder = config.get("added_tokens_decoder") or {}
        tokens = [decoder[key] for key in sorted(decoder, key=int)]
        tokens += [{"content": text, "normalized": True} for text in sorted(added, key=lambda text: int(added[text]))]
        more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
        special = [config.get(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")]
        special += more.values() if isinstance(more, dict) else more
        tokens += [({"content": token} if isinstance(token, str) else token) | _SPECIAL for token in special if token]
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        for token in tokens:
            if token["content"] not in known:
                known.add(token["content"])
                kept = AddedToken(token["content"], **{flag: token[flag] for flag in _FLAGS if flag in token})
                (tokenizer.add_special_tokens if kept.special else tokenizer.add_tokens)([kept])


_SPECIAL = {"special": True}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@contextlib.contextmanager
def _without_panics() -> Iterator[None]:
    """Hold back standard error, and drop it if the library panics: Rust prints the panic, which is also raised."""
    with contextlib.suppress(OSError):  # a full disk, say
        sys.stderr.flush()
    with tempfile.TemporaryFile() as held, contextlib.ExitStack() as restoring:
        own = os.dup(2)
        restoring.callback(os.close, own)
        restoring.callback(os.dup2, own, 2)
        os.dup2(held.fileno(), 2)
        yield
        held.seek(0)
        with contextlib.suppress(OSError):
            os.write(own, held.read())


_SHORT = 4096
"""Maximum characters of a text that is encoded without releasing the interpreter's lock, which takes longer."""


def encode(tokenizer: "Tokenizer", text: str, special: bool = True) -> list[int]:
    """Return the token ids of a text; InputError if the tokenizer has none for a part of it."""
    with refusing("the tokenizer can't encode the text"):
        if len(text) <= _SHORT:
            encoded = tokenizer.encode(text, add_special_tokens=special)
        else:
            (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoded.ids
    return ids
