"""Messages between ranks: a header of JSON, then the bytes of its arrays. Nothing that is received is executed."""

import json
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

_ALIGNED = 8
"""Every array begins at a multiple of so many bytes."""


def pack(what: object) -> bytes:
    """A message of a dataclass, numbers, texts, arrays and tuples of these."""
    arrays: list[bytes] = []

    def plain(one: Any) -> Any:
        if isinstance(one, np.ndarray):
            arrays.append(_padded(np.ascontiguousarray(one).tobytes()))
            return {"array": [one.dtype.str, list(one.shape)]}
        if is_dataclass(one):
            return {"kind": type(one).__name__, "of": {f.name: plain(getattr(one, f.name)) for f in fields(one)}}
        if isinstance(one, tuple | list):
            return [plain(part) for part in one]
        return one.item() if isinstance(one, np.generic) else one

    header = json.dumps(plain(what)).encode()
    return b"".join([_padded(len(header).to_bytes(_ALIGNED, "little")), _padded(header), *arrays])


def unpack(data: bytearray, kinds: tuple[type, ...]) -> Any:
    """What was packed, sequences as tuples; dataclasses of these kinds alone. Arrays share the message's memory."""
    named = {kind.__name__: kind for kind in kinds}
    size = int.from_bytes(data[:_ALIGNED], "little")
    place = _ALIGNED + size + -size % _ALIGNED

    def whole(one: Any) -> Any:
        nonlocal place
        if isinstance(one, list):
            return tuple(whole(part) for part in one)
        if not isinstance(one, dict):
            return one
        if "kind" in one:
            return named[one["kind"]](**{name: whole(value) for name, value in one["of"].items()})
        dtype, shape = np.dtype(one["array"][0]), one["array"][1]
        count = int(np.prod(shape))
        made = np.frombuffer(data, dtype, count, place).reshape(shape) if count else np.zeros(shape, dtype)
        place += count * dtype.itemsize + -(count * dtype.itemsize) % _ALIGNED
        return made

    return whole(json.loads(data[_ALIGNED : _ALIGNED + size]))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNED)
