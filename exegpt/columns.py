"""The columns of a trace: which one holds what, in which unit arrivals are, and which ones nothing reads."""

import difflib
import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exegpt.errors import InputError
from exegpt.quantity import figure_text

COLUMNS: dict[str, tuple[str, ...]] = {
    "input": (
        "input",
        "input_tokens",
        "input_toks",
        "prompt_tokens",
        "ContextTokens",
        "num_prefill_tokens",
        "input_length",
        "input_len",
        "prompt_len",
        "isl",
        "Request tokens",
    ),
    "output": (
        "output",
        "output_tokens",
        "output_toks",
        "completion_tokens",
        "GeneratedTokens",
        "num_decode_tokens",
        "output_length",
        "output_len",
        "response_len",
        "osl",
        "Response tokens",
    ),
    "arrival": (
        "arrival",
        "arrival_s",
        "arrival_time",
        "arrived_at",
        "timestamp",
        "TIMESTAMP",
        "Timestamp",
        "arrival_ms",
        "timestamp_ms",
    ),
}
"""What a trace must or may hold, and the column names it is known by (the public traces: Azure, BurstGPT, Mooncake,
Qwen-Bailian, Vidur), in whatever letters and with whatever between the words.
"""

KEYS = (*COLUMNS, "arrival_s", "arrival_ms")
"""Keys of `--columns`; the last two set an arrival's unit."""

_SECONDS, _MILLISECONDS = 1.0, 1e-3
_UNITS = {"arrivals": _SECONDS, "arrivalms": _MILLISECONDS, "timestampms": _MILLISECONDS}
"""Seconds per unit for names that contain a unit, by their letters alone."""
_SLOWEST_S = 60.0
"""A median gap above this is taken for another unit than seconds."""
_IGNORED = {
    "sessions and prefix caches": (
        *("session", "sessionid", "conversationid", "chatid", "parentchatid", "turn", "hashids", "prefixtokens"),
        *("prefixlength", "cachedtokens", "prefixid"),
    ),
    "images": ("numimages", "images"),
}
"""What isn't simulated → the columns that hold it, in small letters alone."""
_MOMENTS = ("arriv", "timestamp", "datetime", "requesttime", "starttime", "createdat", "sentat")
"""Parts of names that may mean an arrival."""


def parse_columns(text: str) -> dict[str, str]:
    """`input=en_tokens,output=de_tokens` as a dict; InputError for another form."""
    columns = {}
    for part in text.split(","):
        key, _, column = part.partition("=")
        if key.strip() not in KEYS or not column.strip():
            raise InputError(
                f"'{part}' is not a column: write input=NAME,output=NAME and, where there is one, arrival=NAME "
                "(arrival_s=NAME or arrival_ms=NAME where the unit is in doubt)."
            )
        columns[key.strip()] = column.strip()
    return columns


@dataclass(frozen=True)
class Columns:
    """Where a trace's values are, by the names of its columns."""

    input: str
    output: str
    arrival: str | None
    unit_s: float | None
    """Seconds per unit of a numeric arrival; None: not in its name."""
    notes: tuple[str, ...]
    """Sentences about columns that look like something and aren't read."""


def find_columns(names: Sequence[str], asked: Mapping[str, str], path: object) -> Columns:
    """The columns of a trace with these names, of which `asked` (see `parse_columns`) assigns some.

    InputError where the input's or the output's isn't there, or one that was asked for.
    """
    columns = {key: _find(key, names, asked, path) for key in COLUMNS}
    timed = [key for key in ("arrival_s", "arrival_ms") if key in asked]
    if timed:
        columns["arrival"] = _find(timed[0], names, asked, path)
    arrival = columns["arrival"]
    unit_s = _UNITS[_letters(timed[0])] if timed else _unit(arrival, names) if arrival else None
    used = {name for name in columns.values() if name}
    notes = [*_lookalikes([name for name in names if name not in used], columns), *_ignored(names, used)]
    assert columns["input"] and columns["output"]
    return Columns(columns["input"], columns["output"], arrival, unit_s, tuple(f"'{path}': {text}" for text in notes))


def _find(key: str, names: Sequence[str], asked: Mapping[str, str], path: object) -> str | None:
    if key in asked:
        name = asked[key] if asked[key] in names else None
    else:
        letters = {_letters(name): name for name in reversed(names)}
        exact = (name for name in COLUMNS[key] if name in names)
        name = next(exact, None) or next((letters[k] for k in map(_letters, COLUMNS[key]) if k in letters), None)
    if name is None and (key in asked or key != "arrival"):
        known = f"'{asked[key]}'" if key in asked else f"({', '.join(COLUMNS[key][:3])}, …)"
        raise InputError(
            f"'{path}' has no {key} column {known}, only {', '.join(map(repr, names)) or 'none'}: name it with "
            f"--columns {key}=NAME (columns: {key}=NAME in a models file), or rename it."
        )
    return name


def _unit(arrival: str, names: Sequence[str]) -> float | None:
    """Seconds per unit where the names imply it: Mooncake's `timestamp`, beside `hash_ids`, is in milliseconds;
    Qwen-Bailian's, which has a `chat_id` too, in seconds.
    """
    if arrival == "timestamp" and "hash_ids" in names:
        return _SECONDS if "chat_id" in names else _MILLISECONDS
    return _UNITS.get(_letters(arrival))


def unit_of(moments: Iterable[float], column: str, path: object) -> float:
    """Seconds per unit of numeric arrivals without a unit in the name: 1, unless they come so slowly that they must
    be something else, for which InputError asks.
    """
    ordered = sorted(moments)
    gaps = [later - earlier for earlier, later in itertools.pairwise(ordered) if later > earlier]
    gap = statistics.median(gaps) if gaps else 0.0
    if gap <= _SLOWEST_S:
        return _SECONDS
    slow, quick = figure_text(gap / 60), figure_text(gap / 1000)
    raise InputError(
        f"'{path}', column '{column}': its median gap of {figure_text(gap)} is one request every {slow} minutes if it "
        f"is in seconds, and one every {quick} s if it is in milliseconds: pass --columns arrival_s={column} or "
        f"--columns arrival_ms={column}, or write another unit's in seconds."
    )


def _lookalikes(unused: Sequence[str], columns: Mapping[str, str | None]) -> list[str]:
    """A sentence for every unused column whose name resembles a known one."""
    notes = []
    for name in unused:
        key = next((key for key in COLUMNS if _resembles(name, key, columns[key] is None)), None)
        if key and columns[key]:
            notes.append(f"column '{name}' is not read, {key} is '{columns[key]}'; --columns {key}=NAME takes another")
        elif key:
            notes.append(f"column '{name}' is not read as arrivals; if it holds them, pass --columns {key}={name}")
    return notes


def _resembles(name: str, key: str, lacking: bool) -> bool:
    """Whether a column may mean what `key` is; more names do where the trace lacks one."""
    text = _letters(name)
    known = [_letters(other) for other in COLUMNS[key]]
    if lacking and key == "arrival" and (text in ("time", "ts", "date") or any(part in text for part in _MOMENTS)):
        return True
    return bool(difflib.get_close_matches(text, known, n=1, cutoff=0.85))


def _ignored(names: Sequence[str], used: set[str]) -> list[str]:
    """A sentence for each kind of column that the simulation has no use for."""
    notes = []
    for what, known in _IGNORED.items():
        held = [f"'{name}'" for name in names if _letters(name) in known and name not in used]
        if held:
            verb = "is" if len(held) == 1 else "are"
            notes.append(f"{', '.join(held)} {verb} not read: {what} aren't simulated")
    return notes


def _letters(name: Any) -> str:
    return re.sub("[^a-z]", "", str(name).lower())
