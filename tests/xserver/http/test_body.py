"""Request bodies: compressed ones, and their limits."""

import asyncio
import gzip
import json
import zlib

import pytest

pytest.importorskip("fastapi")

from starlette.requests import Request

from xserver.http.answered import outcome_of
from xserver.http.api import MAX_BODY
from xserver.http.api_error import ApiError
from xserver.http.body import decompressed, read_json


def tokenized(server, body, encoding):
    """The status, the headers and the document of an answer to a compressed body."""
    status, headers, data = server.post("/tokenize", body, Content_Encoding=encoding)
    return status, headers, json.loads(data)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip"])
def test_bodies_may_be_compressed(server, encoding):
    status, _, answer = tokenized(server, gzip.compress(b'{"prompt": "Hello"}'), encoding)
    assert (status, answer["count"]) == (200, 5)


@pytest.mark.parametrize("encoding", ["deflate", "br", "zstd", "gzip, gzip"])
def test_other_encodings_are_refused(server, encoding):
    status, headers, answer = tokenized(server, b"{}", encoding)
    assert status == 415 and headers["accept-encoding"] == "gzip"
    assert "gzip" in answer["error"]["message"]


def test_a_body_that_grows_beyond_the_limit_is_refused(server):
    bomb = gzip.compress(b'{"prompt": "' + b"a" * (4 * MAX_BODY))
    assert len(bomb) < MAX_BODY / 100
    status, _, answer = tokenized(server, bomb, "gzip")
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "body",
    [b"", b'{"prompt": "Hello"}', gzip.compress(b"{}")[:-1], gzip.compress(b"{}") * 2, zlib.compress(b"{}")],
    ids=["empty", "not compressed", "cut off", "two streams", "without gzip's header"],
)
def test_invalid_compressed_bodies_are_refused(server, body):
    status, _, answer = tokenized(server, body, "gzip")
    assert status == 400 and "gzip" in answer["error"]["message"]


def test_the_limit_holds_for_decompressed_bytes():
    data = gzip.compress(b"a" * 1000)
    assert decompressed(data, 1000) == b"a" * 1000
    with pytest.raises(ApiError, match="larger than 999 bytes"):
        decompressed(data, 999)


def test_models_without_an_id_are_the_list(server):
    assert server.get("/v1/models/")[::2] == server.get("/v1/models")[::2]


def test_a_refused_host_names_the_option(server):
    status, _, data = server.get("/v1/models", Host="example.com")
    assert status == 403 and "--allowed-host" in json.loads(data)["error"]["message"]


@pytest.mark.parametrize("received", [[], [{"type": "http.request", "body": b"{", "more_body": True}]])
def test_a_client_that_leaves_before_its_body_is_read_has_cancelled(received):
    """A connection that has closed hides its body, however much of it has arrived: it wasn't an invalid request."""
    messages = iter([*received, {"type": "http.disconnect"}])

    async def receive():
        return next(messages)

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    with pytest.raises(ApiError) as error:
        asyncio.run(read_json(request, MAX_BODY))
    assert outcome_of(error.value.status, ()) == "cancelled"
