"""Request bodies: read only JSON within limits, and refuse invalid bodies before any computation."""

import asyncio
import json
import zlib

from starlette.requests import ClientDisconnect, Request

from xserver.http.api_error import ApiError, invalid

MAX_DEPTH = 64
"""Maximum nesting of JSON, in levels."""
MAX_DIGITS = 400
"""Maximum characters of a number: Python's time to read a longer one grows with the square."""
_DISCARDED = 4
"""A body that is too large is read and discarded up to this multiple of the limit."""
_GZIP = ("gzip", "x-gzip")
"""The names of the accepted Content-Encoding."""
READ_S = 30.0
"""Seconds within which a body must arrive."""


async def read_json(request: Request, max_bytes: int) -> dict[str, object]:
    """Return the JSON document of a request; ApiError if there is none, or if it exceeds the limits."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The body must be JSON: send the header Content-Type: application/json.", "invalid_value")
    coding = ",".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding not in ("", "identity", *_GZIP):
        message = "The body's Content-Encoding is not supported: use gzip, or leave the header out."
        raise ApiError(415, message, "invalid_value", headers={"Accept-Encoding": "gzip"})
    try:
        data = await asyncio.wait_for(_read(request, max_bytes), READ_S)
    except (TimeoutError, asyncio.TimeoutError):
        raise ApiError(408, f"The body was not received completely within {READ_S:g} s.", "request_timeout") from None
    return parse(await asyncio.to_thread(decompressed, data, max_bytes) if coding in _GZIP else data)


def decompressed(data: bytes, max_bytes: int) -> bytes:
    """Return the content of gzip data; ApiError if it is invalid or too large, found without decompressing it all.

    Only one member is accepted, as clients send it: reading a million empty ones would take minutes.
    """
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = stream.decompress(data, max_bytes + 1)
    except zlib.error:
        raise invalid("The body is not valid gzip, which its Content-Encoding promises.") from None
    if len(content) > max_bytes:
        raise _too_large(max_bytes)
    if not stream.eof or stream.unused_data:
        raise invalid("The body is not exactly one complete gzip stream.")
    return content


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_bytes:,} bytes.", "request_too_large")


async def _read(request: Request, max_bytes: int) -> bytes:
    data, size = bytearray(), 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= max_bytes:
                data += chunk
            elif size > _DISCARDED * max_bytes:
                break
    except ClientDisconnect:
        raise ApiError(499, "The client closed the connection.", None) from None  # counted as cancelled
    if size > max_bytes:  # read it first: a client that is still sending would get a reset and no answer
        raise _too_large(max_bytes)
    return bytes(data)


def parse(data: bytes) -> dict[str, object]:
    """Parse a JSON document; ApiError for invalid JSON, for NaN and infinities, and for too deep nesting."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise invalid("The body is not valid UTF-8.") from None
    if _depth(text) > MAX_DEPTH:
        raise invalid(f"The body is nested more than {MAX_DEPTH} levels deep.")
    try:
        value = json.loads(text, parse_constant=_refuse, parse_int=_integer, parse_float=_number)
    except ValueError as error:
        where = f" (at character {error.pos})" if isinstance(error, json.JSONDecodeError) else ""
        raise invalid(f"The body is not valid JSON{where}.") from None
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.")
    if "\\ud" in text.lower() and not _is_unicode(value):
        raise invalid("The body has a lone surrogate, which is not valid Unicode.")
    return value


def _depth(text: str) -> int:
    """Return the maximum number of open brackets; brackets in strings don't count.

    Returns 0 without this count if the text has at most `MAX_DEPTH` opening brackets in all.
    """
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return 0
    depth = most = 0
    inside = escaped = False
    for letter in text:
        if inside:
            inside, escaped = escaped or letter != '"', letter == "\\" and not escaped
        elif letter == '"':
            inside = True
        elif letter in "[{":
            depth += 1
            most = max(most, depth)
        elif letter in "]}":
            depth -= 1
    return most


def _is_unicode(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(_: str) -> None:
    raise ValueError("not a number of JSON")


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError("too long")
    return int(text)


def _number(text: str) -> float:
    value = float(text) if len(text) <= MAX_DIGITS else float("inf")
    if value in (float("inf"), float("-inf")):
        raise ValueError("too large")
    return value
