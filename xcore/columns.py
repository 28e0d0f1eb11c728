"""The columns of a trace: which column holds what, and which ones are not read."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from xcore.errors import InputError
from xcore.traces.arrival_unit import DATE, UNITS, split_unit

_ARRIVALS = ("arrival", "arrival_time", "arrived_at", "timestamp", "arrival_timestamp")

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
        "prompt_size",
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
        "token_size",
        "osl",
        "Response tokens",
    ),
    "arrival": (*_ARRIVALS, *(f"{name}_{unit}" for name in _ARRIVALS for unit in ("s", "ms", "us", "ns"))),
}
"""Columns that a trace must or may have, and its column names in public traces.

The traces are Azure, BurstGPT, Mooncake, Qwen-Bailian, Splitwise and Vidur. Letter case and separators of words don't
matter.
"""
IDENTITIES: dict[str, tuple[str, ...]] = {
    "prompt_ids": ("prompt_ids", "prompt_token_ids"),
    "hash_ids": ("hash_ids",),
    "prefix_id": ("prefix_id",),
    "prefix_tokens": ("prefix_tokens",),
    "conversation_id": ("conversation_id", "session_id", "conversation", "session"),
    "chat_id": ("chat_id",),
    "parent_chat_id": ("parent_chat_id",),
}
"""Further columns that a trace may hold: what its prompts have in common (`PromptIdentity`)."""

_TIMED = {f"arrival_{unit}": unit for unit in (*UNITS, DATE)}
"""Keys of `--columns` that set an arrival's unit; `arrival=NAME:UNIT` becomes one of them."""
_IGNORED = {
    "turns are replayed at their arrival times": ("turn",),
    "the cached tokens of the recorded engine are not used": ("prefixlength", "cachedtokens"),
    "images are not simulated": ("numimages", "images"),
}
"""Reason why columns are not used → their names, in lower-case letters only."""
_MOMENTS = (
    *("arriv", "timestamp", "datetime", "requesttime", "requestdate", "requestts", "reqtime", "starttime", "sendtime"),
    *("eventtime", "eventts", "created", "sentat", "submit", "enqueue"),
)
"""Parts of names that may mean an arrival."""


def parse_columns(text: str) -> dict[str, str]:
    """Parse `input=en_tokens,output=de_tokens,arrival=ts:ms` into a dict; InputError for another form.

    Keys are those of `COLUMNS` and `IDENTITIES`; `session_id` is another name of `conversation_id`.
    """
    columns: dict[str, str] = {}
    for part in text.split(","):
        key, _, column = (word.strip() for word in part.partition("="))
        name, _, unit = column.rpartition(":")
        key = "conversation_id" if key == "session_id" else key
        if key == "arrival" and name.strip() and f"arrival_{unit.strip()}" in _TIMED:
            key, column = f"arrival_{unit.strip()}", name.strip()
        if key not in (*COLUMNS, *IDENTITIES, *_TIMED) or not column:
            raise InputError(
                f"'{part}' is not a column: write input=NAME,output=NAME and, if the trace has arrivals, "
                f"arrival=NAME or arrival=NAME:ms with the unit (units: {', '.join((*UNITS, DATE))}); the columns "
                f"for prompts are {', '.join(IDENTITIES)}."
            )
        if key in columns or (key.startswith("arrival") and any(other.startswith("arrival") for other in columns)):
            raise InputError(
                f"--columns '{text}' names the {key.partition('_')[0]} column twice: remove one of the two."
            )
        columns[key] = column
    return columns


@dataclass(frozen=True)
class Columns:
    """The names of the columns that hold a trace's values."""

    input: str
    output: str
    arrival: str | None
    unit: str | None
    """Requested unit of a numeric arrival; None: its name or its numbers decide."""
    identity: Mapping[str, str]
    """Column names by key of `IDENTITIES`."""
    notes: tuple[str, ...]
    """Sentences about columns that resemble known ones but aren't read."""

    @property
    def read(self) -> tuple[str, ...]:
        """The names of all columns that are read."""
        return (self.input, self.output, *([self.arrival] if self.arrival else []), *self.identity.values())


def find_columns(names: Sequence[str], asked: Mapping[str, str], path: object) -> Columns:
    """Find the columns of a trace among `names`; `asked` (see `parse_columns`) assigns some of them.

    Raises:
        InputError: The input's or the output's column is missing, or a requested one.
    """
    columns = {key: _find(key, names, asked, path) for key in COLUMNS}
    timed = next((key for key in asked if key in _TIMED), None)
    arrival = _find(timed, names, asked, path) if timed else columns["arrival"]
    columns["arrival"] = arrival
    identity = {key: name for key in IDENTITIES if (name := _find(key, names, asked, path))}
    used = {name for name in (*columns.values(), *identity.values()) if name}
    notes = [*_lookalikes([name for name in names if name not in used], columns), *_ignored(names, used)]
    assert columns["input"] and columns["output"]
    unit = _TIMED[timed] if timed else None
    notes += _lone(identity)
    told = tuple(f"'{path}': {text}" for text in notes)
    return Columns(columns["input"], columns["output"], arrival, unit, identity, told)


def has_column(names: Iterable[str]) -> bool:
    """Return whether one of these names is that of a trace's lengths or arrival."""
    known = {(key, _letters(name, key)) for key, listed in COLUMNS.items() for name in listed}
    return any((key, _letters(name, key)) in known for name in names for key in COLUMNS)


def _lone(identity: dict[str, str]) -> list[str]:
    """Remove columns that have no meaning without another one; return a sentence about each."""
    notes = []
    for key, other in (("prefix_id", "prefix_tokens"), ("prefix_tokens", "prefix_id"), ("parent_chat_id", "chat_id")):
        if key in identity and other not in identity:
            notes.append(f"column '{identity.pop(key)}' is not used without a column '{other}'")
    return notes


def _find(key: str, names: Sequence[str], asked: Mapping[str, str], path: object) -> str | None:
    if key in asked:
        spelled = (asked[key], f"{asked[key]}:{_TIMED.get(key)}")  # a name may end like a unit
        name = next((name for name in spelled if name in names), None)
    else:
        known_names = COLUMNS.get(key) or IDENTITIES[key]
        letters = {_letters(name, key): name for name in reversed(names)}
        exact = (name for name in known_names if name in names)
        alike = (letters[known] for known in (_letters(name, key) for name in known_names) if known in letters)
        name = next(exact, None) or next(alike, None)
    if name is None and (key in asked or key in ("input", "output")):
        known = f"'{asked[key]}'" if key in asked else f"({', '.join(COLUMNS[key][:3])}, …)"
        what = key if key in IDENTITIES else key.partition("_")[0]
        raise InputError(
            f"'{path}' has no {what} column {known}, only {', '.join(map(repr, names)) or 'none'}: pass its name "
            f"with --columns {what}=NAME (in a models file: columns: {what}=NAME), or rename it."
        )
    return name


def _lookalikes(unused: Sequence[str], columns: Mapping[str, str | None]) -> list[str]:
    """Return a sentence for every unused column whose name resembles a known one."""
    notes = []
    for name in unused:
        key = next((key for key in COLUMNS if _resembles(name, key, columns[key] is None)), None)
        if key and columns[key]:
            notes.append(
                f"column '{name}' is not used, because {key} is '{columns[key]}'; --columns {key}=NAME selects "
                "another column"
            )
        elif key:
            notes.append(f"column '{name}' is not used for arrivals; if it holds arrivals, pass --columns {key}={name}")
    return notes


def _resembles(name: str, key: str, lacking: bool) -> bool:
    """Return whether a column's name resembles `key`.

    If the trace is `lacking` a column for the key, short names such as `t` for `ts` count too.
    """
    text = _letters(name, key)
    known = [_letters(other, key) for other in COLUMNS[key]]
    if lacking and key == "arrival" and (text in ("time", "t", "date") or any(part in text for part in _MOMENTS)):
        return True
    return bool(difflib.get_close_matches(text, known, n=1, cutoff=0.85))


def _ignored(names: Sequence[str], used: set[str]) -> list[str]:
    """Return a sentence for each kind of column that the simulation doesn't use."""
    notes = []
    for why, known in _IGNORED.items():
        held = [f"'{name}'" for name in names if _letters(name) in known and name not in used]
        if held:
            verb = "is" if len(held) == 1 else "are"
            notes.append(f"{', '.join(held)} {verb} not used: {why}")
    return notes


def _letters(name: object, key: str = "") -> str:
    """Reduce a name to its letters in lower case; an arrival's name also loses its unit and a plural's "s"."""
    text = split_unit(str(name))[0].removesuffix("s") if key == "arrival" else str(name)
    return re.sub("[^a-z]", "", text.lower())
