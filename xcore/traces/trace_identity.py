"""What a trace's rows say of their prompts' tokens."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from xcore.document import parse_json
from xcore.errors import InputError
from xcore.specs.workload import RequestLengths
from xcore.traces.prompt_identity import PromptIdentity

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
"""Tokens of a block in traces with `hash_ids`: Mooncake's, and Qwen-Bailian's, which have a `chat_id` too."""
_NOTHING = PromptIdentity()


def identity_of(row: Mapping[str, object], columns: Mapping[str, str], input: int, where: str) -> PromptIdentity | None:
    """Return what a row says about its prompt's tokens; None if it has no such columns.

    Args:
        row: Values by column.
        columns: Columns by key of `xcore.columns.IDENTITIES`.
        input: Tokens of the prompt.
        where: The file and the row, as messages begin.
    """
    if not columns:
        return None
    names = {key: _name(row.get(columns.get(key, ""))) for key in _NAMES}
    block = BAILIAN_BLOCK if "chat_id" in columns else MOONCAKE_BLOCK
    blocks = _block_ids(*_value(row, columns, "hash_ids", where))
    prefix, parent = names["prefix_id"], names["parent_chat_id"]
    identity = PromptIdentity(
        token_ids=_token_ids(*_value(row, columns, "prompt_ids", where), input),
        block_ids=blocks,
        block_tokens=block if blocks else 0,
        prefix=prefix,
        prefix_tokens=0 if prefix is None else _tokens(*_value(row, columns, "prefix_tokens", where)),
        conversation=names["conversation_id"],
        chat=names["chat_id"],
        parent_chat=None if parent == "-1" else parent,
    )
    return None if identity == _NOTHING else identity


_NAMES = ("prefix_id", "conversation_id", "chat_id", "parent_chat_id")


def _value(row: Mapping[str, object], columns: Mapping[str, str], key: str, where: str) -> tuple[Any, str]:
    """Return a key's value, and the place that messages name."""
    column = columns.get(key, "")
    return row.get(column), f"{where}, column '{column}'"


def _name(value: object) -> str | None:
    missing = value is None or value == "" or (isinstance(value, float) and math.isnan(value))
    return None if missing else str(value)


def _tokens(value: Any, where: str) -> int:
    try:
        tokens = float(value)
    except (TypeError, ValueError, OverflowError):
        tokens = math.nan
    if isinstance(value, bool) or not tokens >= 0 or not tokens.is_integer():
        raise InputError(
            f"{where}: {reprlib.repr(value)} is not a number of tokens: write a whole number of at least 0."
        )
    return int(tokens)


def _ids(value: object, where: str) -> list[Any]:
    """Return a list in a row, or the list in its JSON text; empty if there is no value."""
    if isinstance(value, str) and value:
        value = parse_json(value, f"{where},")
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        raise InputError(f"{where}: {reprlib.repr(value)} is not a list: write a list like [17, 4, 9].")
    return value


def _token_ids(value: object, where: str, input: int) -> tuple[int, ...]:
    ids = _ids(value, where)
    if any(type(token) is not int or not 0 <= token < 2**63 for token in ids):
        raise InputError(f"{where}: {reprlib.repr(value)} are not tokens: they must be whole numbers of at least 0.")
    if ids and len(ids) != input:
        raise InputError(
            f"{where}: it has {len(ids):,} tokens, but the row's input has {input:,}: correct one of the two."
        )
    return tuple(ids)


def _block_ids(value: object, where: str) -> tuple[int | str, ...]:
    ids = _ids(value, where)
    if any(type(block) not in (int, str) for block in ids):
        raise InputError(
            f"{where}: {reprlib.repr(value)} are not names of blocks: they must be whole numbers or texts."
        )
    return tuple(ids)


def blocks_note(requests: Sequence[RequestLengths]) -> str | None:
    """Return a sentence about prompts with more or fewer hash_ids than blocks; None if there is none."""
    known = [(r.input, r.identity) for r in requests if r.identity and r.identity.block_ids]
    size = known[0][1].block_tokens if known else 1
    # With or without the partial block, or a start token.
    odd = sum(abs(len(identity.block_ids) - -(-tokens // size)) > 1 for tokens, identity in known)
    if not odd:
        return None
    like = "Qwen-Bailian's traces, which have a chat_id" if size == BAILIAN_BLOCK else "Mooncake's traces"
    return (
        f"in {odd:,} of {len(known):,} rows the number of hash_ids differs from the prompt's blocks of {size} "
        f"tokens, as in {like}: tokens without an id are treated as unique to their prompt"
    )
