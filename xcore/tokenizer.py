"""A model's tokenizer, read from its tokenizer.json so that every text keeps all of its tokens and gets no others."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
    return tokenizer


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
