"""Nouns as JSON documents: every noun is a frozen dataclass that can be written, read back and fingerprinted."""

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from exegpt.errors import InputError

Noun = TypeVar("Noun")

MAX_BYTES = 256 * 2**20
"""A larger document is refused before it is parsed."""


_adapters: dict[type, Any] = {}
"""What pydantic has built for each noun."""


def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter  # 0.1 s: only what reads or writes documents pays for it

    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]


def to_dict(noun: Any) -> dict[str, Any]:
    """The noun as plain dicts, lists, strings and finite numbers."""
    data: dict[str, Any] = _adapter(type(noun)).dump_python(noun, mode="json")
    return data


def from_dict(cls: type[Noun], data: Any, what: str) -> Noun:
    """A `cls` from plain data, validated; `what` names the source in the InputError that bad data raises."""
    from pydantic import ValidationError

    try:
        noun: Noun = _adapter(cls).validate_python(data, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, InputError):  # a noun's own sentence
            raise InputError(f"{what}: {own}") from None
        where = ".".join(str(part) for part in first["loc"]) or "the top level"
        value = repr(first["input"])
        value = value if len(value) < 60 else value[:57] + "..."
        raise InputError(f"{what} is not a valid {cls.__name__}: {where}: {first['msg']} (got {value}).") from None
    return noun


def dumps(data: Any, indent: int | None = 2) -> str:
    """JSON text without NaN or Infinity."""
    return json.dumps(data, indent=indent, allow_nan=False, ensure_ascii=False)


def fingerprint(noun: Any) -> str:
    """Sixteen hex digits that change whenever the noun's content does."""
    data = to_dict(noun) if dataclasses.is_dataclass(noun) else noun
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all: to a temporary file beside it, then rename."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write(path: str | Path, noun: Any) -> None:
    """Write a noun as a JSON file, atomically."""
    write_text(path, dumps(to_dict(noun)) + "\n")


def read_json(path: str | Path) -> Any:
    """The JSON value in a file; InputError where there is none, or it is too large or torn."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"There is no file '{path}'.")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"'{path}' has {path.stat().st_size:,} bytes: documents of over {MAX_BYTES:,} are refused.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"'{path}' is not valid JSON: {error}.") from None


def read_yaml(path: Path, what: str) -> Any:
    """The content of a YAML file; InputError where there is none ("There is no `what` file") or it isn't YAML."""
    import yaml

    if not path.is_file():
        raise InputError(f"There is no {what} file '{path}'.")
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"'{path}' is not valid YAML: {str(error).splitlines()[0]}.") from None


def read(cls: type[Noun], path: str | Path) -> Noun:
    """Read a noun from a JSON file; InputError says what is wrong with it."""
    return from_dict(cls, read_json(path), f"'{path}'")
