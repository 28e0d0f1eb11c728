"""Specs as JSON documents: every spec is a frozen dataclass that can be written, read back and fingerprinted."""

import dataclasses
import difflib
import hashlib
import json
import os
import re
import reprlib
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xcore.errors import InputError

if TYPE_CHECKING:
    import yaml

SpecT = TypeVar("SpecT")

MAX_BYTES = 256 * 2**20
"""Largest document in bytes; a larger one is refused before it is parsed."""

MAX_LINE = 64 * 2**20
"""Longest line in characters; a longer one is no entry of a list."""

MAX_YAML_BYTES = 2**20
"""Largest YAML document in bytes. YAML is written by hand, and takes a minute per 10 MB to parse."""


_adapters: dict[type, Any] = {}
"""The pydantic adapter of each spec, built on first use."""


def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter  # takes 0.1 s: imported only to read or write documents

    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]


def to_dict(spec: object) -> dict[str, object]:
    """Convert a spec to plain dicts, lists, strings and finite numbers."""
    data: dict[str, object] = _adapter(type(spec)).dump_python(spec, mode="json")
    return data


def from_dict(cls: type[SpecT], data: object, what: str) -> SpecT:
    """Build a `cls` from plain data, with validation; `what` names the source in the InputError for bad data."""
    spec, problems = validated(cls, data)
    if spec is None:
        raise InputError(f"{what}: {'; '.join(problems)}.")
    return spec


def validated(cls: type[SpecT], data: object, also: tuple[str, ...] = ()) -> tuple[SpecT | None, list[str]]:
    """Build a `cls` from plain data; return it, or None and all problems of the data.

    `also`: known keys that the caller has taken out.
    """
    from pydantic import ValidationError

    try:
        spec = _adapter(cls).validate_python(data, strict=False)
        problems = [_problem(detail) for detail in _counted(data, spec, ())]
        if not problems:
            return spec, []
    except ValidationError as error:
        details = _without_branches([dict(detail) for detail in error.errors()])
        problems = list(dict.fromkeys(map(_problem, details))) + _known_keys(cls, details, also)
    more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
    return None, problems[:_MOST_PROBLEMS] + more


_MOST_PROBLEMS = 10
"""Most problems of a document to describe; the rest is only counted."""
_PROBLEMS = {
    "missing": "{where} is missing",
    "unexpected_keyword_argument": "{where} is not known",
    "int": "{where} must be a whole number (got {value})",
    "float": "{where} must be a number (got {value})",
    "string": "{where} must be text (got {value})",
    "bool": "{where} must be true or false (got {value})",
    "dataclass": "{where} must be a group of keys (got {value})",
    "dict": "{where} must be a group of keys (got {value})",
    "tuple": "{where} must be a list (got {value})",
}
"""The problem by the type of pydantic's error, or by the first word of that type."""


_BRANCH = re.compile(r"str|int|float|bool|(dict|tuple|list)\[.*\]")
"""What pydantic adds to an error's place for each type of a union that it has tried."""


def _without_branches(details: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return pydantic's errors with one for each value of a union, instead of one for each type of the union.

    If a type fits the value itself, the errors inside the value count. Otherwise the error names all types.
    """
    unions: dict[tuple[str | int, ...], list[dict[str, Any]]] = {}
    for detail in details:
        loc = detail["loc"]
        at = next((i for i, part in enumerate(loc) if i and isinstance(part, str) and _BRANCH.fullmatch(part)), None)
        unions.setdefault(loc if at is None else loc[:at], []).append(detail)
    merged = []
    for where, errors in unions.items():
        inside = [error for error in errors if len(error["loc"]) > len(where) + 1]
        if all(error["loc"] == where for error in errors):
            merged += errors
        elif inside:
            parts = ([part for part in error["loc"][len(where) + 1 :] if part != "[key]"] for error in inside)
            merged += [error | {"loc": (*where, *part)} for error, part in zip(inside, parts, strict=True)]
        else:
            merged.append(errors[0] | {"loc": where, "types": [error["type"].split("_")[0] for error in errors]})
    return merged


def _problem(error: dict[str, Any]) -> str:
    """Return the message of one of pydantic's errors, in this project's words."""
    cause = error.get("ctx", {}).get("error")
    where = ".".join(str(part) for part in error["loc"]) or "the top level"
    if isinstance(cause, InputError):  # a spec's own sentence doesn't name the list entry
        in_list = any(isinstance(part, int) for part in error["loc"])
        return (f"{where}: " if in_list else "") + str(cause).rstrip(".")
    value = reprlib.repr(error["input"])  # never all of it: a YAML file's aliases can make it endless
    value = value if len(value) < 60 else value[:57] + "..."
    form = _PROBLEMS.get(error["type"]) or _PROBLEMS.get(error["type"].split("_")[0])
    if "types" in error and all(kind in _PROBLEMS for kind in error["types"]):
        either = " or ".join(_PROBLEMS[kind].split(" must be ")[1].split(" (")[0] for kind in error["types"])
        return f"{where} must be {either} (got {value})"
    if form:
        quotes = (
            ": put it in quotes" if error["type"] == "string_type" and isinstance(error["input"], bool | int) else ""
        )
        return form.format(where=where, value=value) + quotes
    return f"{where} {error['msg'].replace('Input should be', 'must be')} (got {value})"


def _counted(data: object, spec: object, where: tuple[str | int, ...]) -> Iterator[dict[str, Any]]:
    """Yield an error for each true or false that became a number: pydantic accepts them as 1 and 0."""
    if isinstance(data, bool) and isinstance(spec, int | float) and not isinstance(spec, bool):
        yield {"type": "int" if isinstance(spec, int) else "float", "loc": where, "input": data}
    elif isinstance(data, dict):
        for key, value in data.items():
            if isinstance(value, bool | dict | list | tuple):
                part = spec.get(key) if isinstance(spec, dict) else getattr(spec, str(key), None)
                yield from _counted(value, part, (*where, key))
    elif isinstance(data, list | tuple) and isinstance(spec, list | tuple):
        for place, (value, part) in enumerate(zip(data, spec, strict=False)):
            if isinstance(value, bool | dict | list | tuple):
                yield from _counted(value, part, (*where, place))


def _known_keys(cls: type, details: list[dict[str, Any]], also: tuple[str, ...]) -> list[str]:
    """Return the keys to write instead of the first unknown key: similar ones, or else all."""
    for detail in details:
        if detail["type"] == "unexpected_keyword_argument":
            *group, wrong = detail["loc"]
            names = [*(() if group else also), *_fields(cls, group)]
            near = difflib.get_close_matches(str(wrong), names, n=3, cutoff=0.65)
            return [f"instead of {wrong} write {', '.join(near)}" if near else f"the known keys are {', '.join(names)}"]
    return []


def _fields(kind: object, group: list[str | int]) -> list[str]:
    """Return the keys of a group within a spec."""
    specs = _specs_in(kind)
    for place, part in enumerate(group):
        hints = [hint for spec in specs if (hint := typing.get_type_hints(spec).get(str(part)))]
        if hints:
            return _fields(hints[0], group[place + 1 :])
    return [field.name for spec in specs for field in dataclasses.fields(spec)]


def _specs_in(kind: object) -> list[type]:
    """Return the specs of a type like `tuple[Spec, ...] | None`."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [kind]
    return [spec for part in typing.get_args(kind) for spec in _specs_in(part)]


def dumps(data: object, indent: int | None = 2) -> str:
    """Return JSON text without NaN or Infinity; text that UTF-8 can't hold (a path's odd bytes) stays an escape."""
    text = json.dumps(data, indent=indent, allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def fingerprint(spec: object) -> str:
    """Return sixteen hex digits that change whenever the spec's content does."""
    data = to_dict(spec) if dataclasses.is_dataclass(spec) else spec
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def write_text(path: str | Path, text: str) -> None:
    """Write a file completely or not at all: to a temporary file in the same directory, then rename."""
    path = Path(os.path.realpath(path))  # the target of a link is written, and the link stays
    handle, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write(path: str | Path, spec: object) -> None:
    """Write a spec as a JSON file, atomically."""
    write_text(path, dumps(to_dict(spec)) + "\n")


def article(spec: str) -> str:
    """Return the indefinite article for a spec's name."""
    return "an" if spec[0] in "aeio" else "a"


def check_file(path: Path, what: str = "file") -> None:
    """Raise InputError unless the path is a plain file: reading a pipe or a device could block for ever."""
    if path.is_dir():
        raise InputError(f"'{path}' is a folder: name {article(what)} {what} in it.")
    if not path.exists():
        raise InputError(f"There is no {what} '{path}'.")
    if not path.is_file():
        raise InputError(f"'{path}' is a pipe or a device: name {article(what)} {what} that is a regular file.")


def read_text(path: Path, what: str = "file", most: int = MAX_BYTES) -> str:
    """Return the UTF-8 text of a file, without a byte order mark; InputError if it is missing or over `most` bytes."""
    check_file(path, what)
    if path.stat().st_size > most:
        raise InputError(
            f"'{path}' has {path.stat().st_size:,} bytes, but a document may have at most {most:,}: make it smaller."
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None


def _not_utf8(path: Path, error: UnicodeDecodeError) -> InputError:
    """Return the error for a file that is no text, by its first bytes."""
    with path.open("rb") as file:
        head = file.read(4)
    for mark, text in _NO_TEXT.items():
        if head.startswith(mark):
            return InputError(f"'{path}' is {text}.")
    return InputError(f"'{path}' is not in UTF-8 ({error}): save it in that encoding.")


_NO_TEXT = {
    b"\xff\xfe": "in UTF-16: save it in UTF-8",
    b"\xfe\xff": "in UTF-16: save it in UTF-8",
    b"\x1f\x8b": "compressed: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed: unpack it",
    b"PK\x03\x04": "compressed or a spreadsheet: unpack it, or save it as CSV",
    b"PAR1": "a Parquet file: end its name in .parquet",
}
"""First bytes of a file → what the file is, and the way out."""


def read_lines(path: Path, what: str = "file", newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, without a byte order mark.

    Raises:
        InputError: The file is missing, or a line has over MAX_LINE characters. Such a file is no list of lines, and
            would fill the memory.
    """
    check_file(path, what)
    with path.open(encoding="utf-8-sig", newline=newline) as file:
        try:
            while line := file.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    raise InputError(
                        f"'{path}' has a line of more than {MAX_LINE:,} characters: write one entry per line."
                    )
                yield line
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from None


def parse_json(text: str, what: str) -> Any:
    """Parse a text as a JSON value.

    NaN and Infinity are no JSON, and half of a surrogate pair is no text.

    Raises:
        InputError: The text is no JSON; the message begins with `what`.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""
        why = f"{error.msg.removesuffix(' at')} at {line}column {error.colno}"  # some of its messages end in " at"
    except RecursionError:
        why = "it is nested too deeply"
    except UnicodeEncodeError:
        why = "it has half of a surrogate pair, which is not valid text"
    except ValueError as error:  # a number that JSON doesn't have, or one of thousands of digits
        why = str(error).split(";")[0]
    raise InputError(f"{what} is not valid JSON: {why}.")


_SURROGATE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F]")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def read_json(path: str | Path) -> Any:
    """Return the JSON value in a file; InputError if the file is missing, too large or incomplete."""
    return parse_json(read_text(Path(path)), f"'{path}'")


def read_yaml(path: Path, what: str) -> Any:
    """Return the content of a YAML file.

    Raises:
        InputError: The file is missing ("There is no `what` file"), or isn't YAML.
    """
    import yaml

    text = read_text(path, f"{what} file", MAX_YAML_BYTES)
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is not None:
            _refuse_repeated_keys(node)
        if _SURROGATE.search(text):
            raise InputError(
                f"'{path}' has half of a surrogate pair, which is not valid text: write the character itself."
            )
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"'{path}' is not valid YAML: {problem}{place}.") from None
    except InputError:
        raise
    except (RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        # nested too deeply; an invalid date; a tag whose value has another type
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"'{path}' can't be read as YAML: {why}.") from None


def _refuse_repeated_keys(root: "yaml.Node") -> None:
    """Raise YAMLError for a group in which a key occurs twice: YAML would keep only the last value."""
    import yaml

    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):  # an alias has been seen
            continue
        seen.add(id(node))
        pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, value) for value in node.value]
        nodes += [value for _, value in pairs]
        keys = set()
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                problem = f"the key '{key.value}' appears twice in the same group"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            keys.add(key.value)


KEY_OF_KIND = {"Schedule": "policy", "StagePlan": "stages", "Plan": "models", "Profile": "degrees"}
"""A key that only files of one class have, in the order in which the keys decide: schedules have stages too."""


def kind_of(data: object) -> str | None:
    """Return the class of a file's content; None if it is of none of the known classes."""
    keys = data.keys() if isinstance(data, dict) else ()
    return next((kind for kind, key in KEY_OF_KIND.items() if key in keys), None)


def kind_text(kind: str) -> str:
    """Return a class of files in words."""
    return "stage plan" if kind == "StagePlan" else kind.lower()


def check_kind(data: object, kind: str, path: str | Path) -> None:
    """Raise InputError if a file that should be of one of the known classes is of another."""
    other = kind_of(data)
    if kind in KEY_OF_KIND and other not in (None, kind):
        raise InputError(
            f"'{path}' is a {kind_text(str(other))}, not a {kind_text(kind)}: name the file of a {kind_text(kind)}."
        )


def read(cls: type[SpecT], path: str | Path) -> SpecT:
    """Read a spec from a JSON file; InputError lists all problems."""
    data = read_json(path)
    check_kind(data, cls.__name__, path)
    return from_dict(cls, data, f"'{path}'")
