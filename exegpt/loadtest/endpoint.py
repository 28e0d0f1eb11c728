"""The endpoint: the model that it serves, and the format of requests to it."""

import asyncio
import json
import os
from dataclasses import dataclass

from exegpt.loadtest.connection import Address, ConnectionPool, ExchangeError
from exegpt.loadtest.response import Response
from xcore import __version__
from xcore.errors import InputError

PATHS = {"completions": "/completions", "chat": "/chat/completions"}
_ASKING_S = 30.0


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server and its model."""

    address: Address
    model: str
    context: int | None
    """Maximum tokens of a request's prompt and output (vLLM's `max_model_len`); None if the endpoint doesn't report it.
    """


def find_endpoint(url: str, model: str | None) -> Endpoint:
    """Return the endpoint at a URL, after a request for its models.

    Raises InputError if the server doesn't answer, or has no such model. If the server has no /models, `model` is not
    checked.
    """
    address = Address.of(url)
    answer = asyncio.run(_models(address, url))
    document = answer.document if answer.status == 200 else None
    cards = document.get("data") if isinstance(document, dict) else None
    known = {card["id"]: card for card in cards or () if isinstance(card, dict) and isinstance(card.get("id"), str)}
    if model is None and not known:
        said = f" ({answer.status}: {answer.message or 'no models'})"
        raise InputError(f"'{url}' doesn't list its models{said}: correct the URL, or name the model with --model.")
    name = model or next(iter(known))
    if known and name not in known:
        raise InputError(f"'{url}' doesn't serve '{name}': use one of {', '.join(list(known)[:5])}.")
    context = known.get(name, {}).get("max_model_len")
    return Endpoint(address, name, context if isinstance(context, int) else None)


async def _models(address: Address, url: str) -> Response:
    pool, answer = ConnectionPool(address), Response()
    try:
        await pool.exchange(http_request(address, "/models", None), answer, _ASKING_S)
    except ExchangeError as error:
        raise InputError(f"'{url}' doesn't answer ({error}): start a server there, or correct the URL.") from None
    finally:
        pool.close()
    return answer


def http_request(address: Address, path: str, document: dict[str, object] | None) -> bytes:
    """Return the bytes of a POST of a document, or of a GET; with the key in OPENAI_API_KEY, if it is set."""
    body = b"" if document is None else json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    head = [
        f"{'GET' if document is None else 'POST'} {address.path}{path} HTTP/1.1",
        f"Host: {address.host}",
        f"User-Agent: exegpt/{__version__}",
        "Accept: text/event-stream, application/json",
    ]
    if document is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if key := os.environ.get("OPENAI_API_KEY"):
        if not (key.isascii() and key.isprintable()):
            raise InputError("OPENAI_API_KEY has characters that an HTTP header cannot contain: correct the key.")
        head.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*head, "", ""]).encode() + body
