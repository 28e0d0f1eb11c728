"""Messages between ranks and between processes: a header of JSON, then arrays. Nothing received is executed."""

import json
from dataclasses import fields, is_dataclass
from functools import cache
from math import prod
from typing import Any, get_args, get_type_hints

import numpy as np

from xcore.policies import record_named
from xcore.policies.control import Control

_ALIGNED = 8
"""Alignment of every array in bytes."""
_AS_THEY_ARE = int, float, str, bool, type(None)


def pack(message: object) -> bytes:
    """Pack a message of dataclasses, numbers, texts, arrays, and tuples, lists and dicts of these."""
    arrays: list[bytes] = []

    def encode(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(_padded(np.ascontiguousarray(value).tobytes()))
            return {"array": [value.dtype.str, list(value.shape)]}
        if isinstance(value, tuple | list):
            return [item if type(item) in _AS_THEY_ARE else encode(item) for item in value]
        if isinstance(value, Control):  # by keyword: a schedule's field is typed by the base of all policies' records
            return {"control": type(value).__name__, "of": encode(value.variables)}
        if is_dataclass(value):
            given = [getattr(value, name) for name in _names(value.__class__)]
            return {"kind": type(value).__name__, "of": encode(given)}
        if isinstance(value, dict):
            return {"pairs": [[encode(key), encode(item)] for key, item in value.items()]}
        return value.item() if isinstance(value, np.generic) else value

    header = json.dumps(encode(message)).encode()
    return b"".join([_padded(len(header).to_bytes(_ALIGNED, "little")), _padded(header), *arrays])


def unpack(data: bytearray, kinds: tuple[type, ...]) -> Any:
    """Unpack an object; sequences become tuples, and arrays share the message's memory.

    Raises:
        KeyError: A dataclass is neither among `kinds` nor a type of their fields.
    """
    classes = _classes(kinds)
    size = int.from_bytes(data[:_ALIGNED], "little")
    place = _ALIGNED + size + -size % _ALIGNED

    def decode(value: Any) -> Any:
        nonlocal place
        if isinstance(value, list):
            return tuple(item if type(item) in _AS_THEY_ARE else decode(item) for item in value)
        if not isinstance(value, dict):
            return value
        if "kind" in value:
            return classes[value["kind"]](*decode(value["of"]))
        if "control" in value:
            return record_named(value["control"])(**decode(value["of"]))
        if "pairs" in value:
            return {decode(key): decode(item) for key, item in value["pairs"]}
        dtype, shape = np.dtype(value["array"][0]), value["array"][1]
        count = prod(shape)
        array = np.frombuffer(data, dtype, count, place).reshape(shape) if count else np.zeros(shape, dtype)
        place += count * dtype.itemsize + -(count * dtype.itemsize) % _ALIGNED
        return array

    return decode(json.loads(data[_ALIGNED : _ALIGNED + size]))


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _classes(kinds: tuple[type, ...]) -> dict[str, type]:
    """Return these dataclasses and the dataclasses of their fields, by name."""
    classes: dict[str, type] = {}

    def collect(hint: Any) -> None:
        for part in get_args(hint):
            collect(part)
        if isinstance(hint, type) and is_dataclass(hint) and classes.get(hint.__name__) is not hint:
            if hint.__name__ in classes:
                raise TypeError(f"Two dataclasses of one message are called {hint.__name__}.")
            classes[hint.__name__] = hint
            for inner in get_type_hints(hint).values():
                collect(inner)

    for kind in kinds:
        collect(kind)
    return classes


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNED)
