"""Grammars: outputs whose every token continues a JSON schema or a Lark grammar, by the package llguidance.

A sequence has a matcher on its driver, which gets every token of the output and gives the mask of the next one. The
matcher therefore survives a preemption. A step that samples such a sequence's token waits for the previous token.
"""

import contextlib
import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xcore.document import read_text
from xcore.errors import InputError, refusing
from xcore.requests.request import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_COMPILED = 64
"""Number of compiled grammars that are kept and copied: compiling a schema can take a second (`compiling.py`)."""


class Grammar:
    """The state of one sequence in its grammar; a `Constraint`."""

    def __init__(self, matcher: "LLMatcher"):
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Return whether nothing can follow: the grammar allows no more, an EOS was generated, or it has failed."""
        return self._matcher.is_stopped()

    @property
    def failed(self) -> bool:
        """Return whether the grammar can't be followed any more, for example because it has become too complex."""
        return self._matcher.is_error()

    def mask(self) -> NDArray[np.int32]:
        """Return the tokens that may come next, as `LogitEdits.allowed`: int32 [ceil(vocab / 32)]."""
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)

    def consume(self, token: int) -> None:
        """Advance by a token of the output."""
        self._matcher.consume_token(token)


class Grammars:
    """The grammars of one model's requests.

    `path` is the model's tokenizer.json, None if the model has no directory; `eos` are its stop tokens, and `vocab` is
    the number of its tokens. Files are read and llguidance is imported only when a request has a grammar, or in
    `prepare`.
    """

    def __init__(self, path: Path | None, eos: frozenset[int], vocab: int):
        self._path, self._eos, self._vocab = path, eos, vocab
        self._tokenizer: LLTokenizer | None = None
        self._outcomes: OrderedDict[str, LLMatcher | InputError] = OrderedDict()
        """By grammar, in the order of last use: its matcher, or the error."""
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read the tokenizer now. If it can't be used, each request with a grammar is refused later.

        Reading holds Python's lock: with 128,000 tokens, everything else waits for half a second (`python -m
        benchmarks.grammars`).
        """
        with contextlib.suppress(InputError):
            self._read_tokenizer()

    def known(self, grammar: str) -> bool:
        """Return whether a grammar has been compiled or refused, so that `check` and `start` take no time."""
        with self._lock:
            return grammar in self._outcomes

    def compile(self, grammar: str) -> "LLMatcher | InputError":
        """Compile a grammar, or find why it can't be compiled, and keep the result; from any thread."""
        outcome: LLMatcher | InputError
        try:
            outcome = self._compile(grammar)
        except InputError as error:
            outcome = error
        with self._lock:
            self._outcomes[grammar] = outcome
            while len(self._outcomes) > _COMPILED:
                self._outcomes.popitem(last=False)
        return outcome

    def check(self, request: Request) -> None:
        """Raise InputError, naming the id, if a request's grammar can't be followed."""
        if request.grammar is not None:
            try:
                self._compiled(request.grammar)
            except InputError as error:
                raise InputError(f"Request '{request.id}' has a grammar, and {error}") from None

    def start(self, request: Request) -> Grammar | None:
        """Return a request's grammar at its beginning; None if it has none. Raises InputError as `check` does."""
        if request.grammar is None:
            return None
        self.check(request)
        return Grammar(self._compiled(request.grammar).deep_copy())

    def _compiled(self, grammar: str) -> "LLMatcher":
        with self._lock:
            outcome = self._outcomes.get(grammar)
            if outcome is not None:
                self._outcomes.move_to_end(grammar)
        if outcome is None:
            outcome = self.compile(grammar)
        if isinstance(outcome, InputError):
            raise InputError(str(outcome))
        return outcome

    def _compile(self, grammar: str) -> "LLMatcher":
        tokenizer = self._read_tokenizer()
        from llguidance import LLMatcher

        with refusing("llguidance refuses it"):
            if _is_schema(grammar):
                grammar = LLMatcher.grammar_from_json_schema(grammar)
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            allowed = b"" if matcher.is_error() else matcher.compute_bitmask()  # which may find an error, too
            if matcher.is_error():
                raise InputError(f"llguidance refuses it: {_first_line(matcher.get_error())}.")
            if not any(allowed) and not matcher.is_accepting():
                raise InputError("no token can begin an output that matches it.")
            return matcher

    def _read_tokenizer(self) -> "LLTokenizer":
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise InputError("the package llguidance is not installed: pip install llguidance.") from None
        if self._tokenizer is None:
            if self._path is None or not self._path.is_file():
                raise InputError("the model has no tokenizer.json, and grammars need one.")
            text = read_text(self._path)
            with refusing(f"llguidance can't use '{self._path}'"):
                self._tokenizer = LLTokenizer(text, self._vocab, sorted(self._eos) or None)
        return self._tokenizer


def _is_schema(grammar: str) -> bool:
    """Return whether a grammar is a JSON schema alone, without llguidance's own document around it."""
    try:
        document = json.loads(grammar)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "grammars" not in document


def _first_line(message: str) -> str:
    """Return the first line of a message, without a full stop."""
    return message.strip().partition("\n")[0].rstrip(". ")
