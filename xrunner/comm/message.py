"""Messages between ranks: a header of JSON, then the bytes of its arrays. Nothing that is received is executed."""

import json
from dataclasses import fields, is_dataclass
from functools import cache
from math import prod
from typing import Any, get_args, get_type_hints

import numpy as np

_ALIGNED = 8
"""Every array begins at a multiple of so many bytes."""
_AS_THEY_ARE = int, float, str, bool, type(None)


def pack(what: object) -> bytes:
    """A message of dataclasses, numbers, texts, arrays, and tuples, lists and dicts of these."""
    arrays: list[bytes] = []

    def plain(one: Any) -> Any:
        if isinstance(one, np.ndarray):
            arrays.append(_padded(np.ascontiguousarray(one).tobytes()))
            return {"array": [one.dtype.str, list(one.shape)]}
        if is_dataclass(one):
            return {"kind": type(one).__name__, "of": {f.name: plain(getattr(one, f.name)) for f in fields(one)}}
        if isinstance(one, tuple | list):
            return [part if type(part) in _AS_THEY_ARE else plain(part) for part in one]
        if isinstance(one, dict):
            return {"pairs": [[plain(key), plain(value)] for key, value in one.items()]}
        return one.item() if isinstance(one, np.generic) else one

    header = json.dumps(plain(what)).encode()
    return b"".join([_padded(len(header).to_bytes(_ALIGNED, "little")), _padded(header), *arrays])


def unpack(data: bytearray, kinds: tuple[type, ...]) -> Any:
    """What was packed, sequences as tuples; dataclasses of these kinds, and of their fields, alone: KeyError for
    another. Arrays share the message's memory.
    """
    named = _named(kinds)
    size = int.from_bytes(data[:_ALIGNED], "little")
    place = _ALIGNED + size + -size % _ALIGNED

    def whole(one: Any) -> Any:
        nonlocal place
        if isinstance(one, list):
            return tuple(part if type(part) in _AS_THEY_ARE else whole(part) for part in one)
        if not isinstance(one, dict):
            return one
        if "kind" in one:
            return named[one["kind"]](**{name: whole(value) for name, value in one["of"].items()})
        if "pairs" in one:
            return {whole(key): whole(value) for key, value in one["pairs"]}
        dtype, shape = np.dtype(one["array"][0]), one["array"][1]
        count = prod(shape)
        made = np.frombuffer(data, dtype, count, place).reshape(shape) if count else np.zeros(shape, dtype)
        place += count * dtype.itemsize + -(count * dtype.itemsize) % _ALIGNED
        return made

    return whole(json.loads(data[_ALIGNED : _ALIGNED + size]))


@cache
def _named(kinds: tuple[type, ...]) -> dict[str, type]:
    """These dataclasses and those of their fields, by name."""
    found: dict[str, type] = {}

    def look(hint: Any) -> None:
        for part in get_args(hint):
            look(part)
        if isinstance(hint, type) and is_dataclass(hint) and found.get(hint.__name__) is not hint:
            if hint.__name__ in found:
                raise TypeError(f"Two dataclasses of one message are called {hint.__name__}.")
            found[hint.__name__] = hint
            for inner in get_type_hints(hint).values():
                look(inner)

    for kind in kinds:
        look(kind)
    return found


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNED)
