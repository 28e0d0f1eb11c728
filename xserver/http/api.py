"""The HTTP interface: routes, and the format of errors."""

import asyncio
import hashlib
import json
from functools import partial
from inspect import signature
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from xcore import __version__
from xcore.console import output
from xserver.http.administration import add_administration
from xserver.http.answer_routes import AnswerRoutes, Endpoint
from xserver.http.answering import ApiAnswer, answer, run_entry
from xserver.http.api_error import SERVER, ApiError, invalid
from xserver.http.body import read_json
from xserver.http.chat import ChatAnswer
from xserver.http.completions import CompletionAnswer
from xserver.http.frontend import Frontend
from xserver.http.frontends import Frontends
from xserver.http.journal import Entry
from xserver.http.openapi import Description
from xserver.http.pages import add_pages
from xserver.http.responses import (
    ChatChunk,
    ChatCompletion,
    DetokenizedText,
    ModelCard,
    ModelList,
    ResponseDocument,
    ResponseEvent,
    Returned,
    TextCompletion,
    TokenizerInfo,
    Tokens,
    Version,
)
from xserver.http.responses_answer import ResponsesAnswer
from xserver.http.responses_schemas import ResponsesRequest
from xserver.http.sampling_params import random_seed
from xserver.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Document,
    TokenizeChat,
    TokenizePrompt,
    parsed,
)
from xserver.http.served_model import ServedModel
from xserver.text.conversation import prompt_of

MAX_BODY = 16 * 2**20
"""Maximum size of a request's body, in bytes."""
_NOT_SERVED = "This path does not exist: /openapi.json lists the paths of this server."


def make_api(frontends: Frontends) -> FastAPI:
    """Return the application with all routes."""
    described = Description()
    more: dict[str, Any] = {"telemetry": {"tracing": False, "metrics": False, "logs": False}}  # requests have ours
    if not more.keys() <= signature(FastAPI).parameters.keys():
        more = {}  # an older FastAPI, which has none
    api = FastAPI(
        title="exegpt",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=described.errors,
        **more,
    )
    _add_errors(api)
    _add_state(api, described, frontends)
    add_pages(api, described, frontends)
    _add_models(api, described, frontends)
    _add_answers(api, described, frontends)
    _add_tokens(api, described, frontends)
    add_administration(api, described, frontends)
    described.complete(api)
    return api


def _add_errors(api: FastAPI) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        request.state.code = error.code
        return error.response

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException) or hasattr(error, "status_code")
        status = error.status_code
        text = {404: _NOT_SERVED, 405: "This path does not support this method."}.get(status, "The request failed.")
        code = {404: "not_found", 405: "method_not_allowed"}.get(status)
        return ApiError(status, text, code, headers=dict(getattr(error, "headers", None) or {})).response

    async def validation_error(_: Request, error: Exception) -> Response:
        return ApiError(400, "The request's parameters are not valid.", "invalid_value").response

    async def bug(_: Request, error: Exception) -> Response:
        return ApiError(
            500, "An internal error occurred: see the server's log.", "internal_error", None, SERVER
        ).response

    from starlette.exceptions import HTTPException as StarletteError

    api.add_exception_handler(ApiError, api_error)
    api.add_exception_handler(StarletteError, http_error)
    api.add_exception_handler(RequestValidationError, validation_error)
    api.add_exception_handler(Exception, bug)


def _add_state(api: FastAPI, described: Description, frontends: Frontends) -> None:
    @api.get("/health", summary="Whether the process is alive.", response_class=PlainTextResponse)
    @api.get("/ping", summary="The same.", include_in_schema=False)
    async def health() -> Response:
        return PlainTextResponse("")

    @api.get("/ready", summary="Whether the server accepts requests.", response_class=PlainTextResponse)
    async def ready() -> Response:
        frontends.check_ready()
        return PlainTextResponse("")

    @api.get("/version", summary="The server's version.", **described.route(Version))
    async def version() -> Response:
        return JSONResponse({"version": __version__})


def _add_models(api: FastAPI, described: Description, frontends: Frontends) -> None:
    @api.get("/v1/models", summary="The served models.", **described.route(ModelList))
    async def models() -> Response:
        return JSONResponse(
            {"object": "list", "data": [frontend.model.card for frontend in frontends.by_name.values()]}
        )

    @api.get("/v1/models/{name:path}", summary="One served model.", **described.route(ModelCard))
    async def one_model(name: str) -> Response:
        if not name:  # /v1/models/
            return await models()
        return JSONResponse(frontends.of(name).model.card)


KINDS: dict[str, tuple[type[Document], Any, str]] = {
    "/v1/completions": (CompletionRequest, CompletionAnswer, "Continue prompts."),
    "/v1/chat/completions": (ChatRequest, ChatAnswer, "Answer conversations."),
    "/v1/responses": (ResponsesRequest, ResponsesAnswer, "Answer conversations, in the form of responses."),
}
"""The body, the answer and the summary of each path."""
RETURNED: dict[str, tuple[type[Returned], type[Returned]]] = {
    "/v1/completions": (TextCompletion, TextCompletion),
    "/v1/chat/completions": (ChatCompletion, ChatChunk),
    "/v1/responses": (ResponseDocument, ResponseEvent),
}
"""The documents of its answers, and of its streams' events."""


def _add_answers(api: FastAPI, described: Description, frontends: Frontends) -> None:
    endpoints: dict[str, Endpoint] = {}

    def route(path: str) -> None:
        kind, answer_kind, summary = KINDS[path]

        async def endpoint(request: Request) -> Response:
            data = await read_json(request, MAX_BODY)
            body: Any = parsed(kind, data)  # of a kind that has what `answer_kind` reads
            frontend = frontends.of(body.model)
            if frontends.separate_keys:
                data["cache_salt"] = salt_of_key(request.headers.get("authorization", ""), body.cache_salt)
                body = parsed(kind, data)
            request.state.monitor = frontend.monitor
            client = salt_of_key(request.headers.get("authorization", ""), None)
            if frontends.residency:
                labels = body.metadata or {}
                request.state.leave = await frontends.residency.enter(frontend.model.name, client, labels)
            if entry := _entry(request, path, data, frontend):
                frontend = frontends.of(body.model, entry)
                request.state.monitor = frontend.monitor
                return await answer(request, lambda: _of(client, journalled(entry, frontend)), frontend, entry)
            answer_id = request.state.request_id
            return await answer(request, lambda: _of(client, answer_kind(body, frontend, answer_id)), frontend)

        endpoints[path] = endpoint
        route = described.route(RETURNED[path][0], kind, RETURNED[path][1])
        api.add_api_route(path, endpoint, methods=["POST"], summary=summary, response_model=None, **route)

    for path in KINDS:
        route(path)
    api.add_middleware(AnswerRoutes, endpoints=endpoints)

    @api.get("/v1/responses/{name:path}", include_in_schema=False)
    @api.delete("/v1/responses/{name:path}", include_in_schema=False)
    async def kept(name: str) -> Response:
        raise ApiError(404, "This server keeps no responses: read the answer of POST /v1/responses.", "not_found")

    @api.post("/v1/responses/{name:path}", include_in_schema=False)
    async def unknown(name: str) -> Response:
        message = (
            "This server has only POST /v1/responses; POST /tokenize counts the tokens of a prompt or of messages."
        )
        raise ApiError(404, message, "not_found")


def _of(client: str, work: ApiAnswer) -> ApiAnswer:
    """Return the answer with its client, whose runs of applications are its own."""
    work.client = client
    return work


def salt_of_key(authorization: str, salt: str | None) -> str:
    """Return the salt of a request that shares prefixes only with requests of the same API key and salt."""
    key = authorization.partition(" ")[2]
    return hashlib.sha256(json.dumps([key, salt]).encode()).hexdigest()


def make_answer(
    path: str, data: dict[str, object], frontend: Frontend, answer_id: str, created: int | None = None
) -> ApiAnswer:
    """Return the answer to a valid body.

    Raises ApiError for an invalid body, or for a path in the journal of another version.
    """
    if path not in KINDS:
        raise ApiError(404, _NOT_SERVED, "not_found")
    kind, answer_kind, _ = KINDS[path]
    work: ApiAnswer = answer_kind(parsed(kind, data), frontend, answer_id, created)
    return work


def journalled(entry: Entry, frontend: Frontend) -> ApiAnswer:
    """Return the answer to a journalled request: the same id and time for every caller."""
    return make_answer(entry.path, entry.body, frontend, entry.answer_id, entry.created)


def _entry(request: Request, path: str, data: dict[str, object], frontend: Frontend) -> Entry | None:
    """Return the journal's entry of a request with an Idempotency-Key; None without a key or a journal."""
    key = request.headers.get("idempotency-key")
    if key is None or frontend.journal is None:
        return None
    caller, answer_id = request.headers.get("authorization", ""), request.state.request_id
    return frontend.journal.entry(caller, key, path, data, random_seed, answer_id)


async def resume_entries(frontend: Frontend, entries: list[Entry]) -> None:
    """Run journalled requests to a model that another process has left unanswered.

    Requests that this server would refuse are deleted: its model may differ.
    """
    for entry in entries:
        async with entry.admitting:
            if entry.outputs is None:
                make = partial(journalled, entry, frontend)
                try:
                    work = make()
                    await asyncio.to_thread(work.prepare, frontend)
                except ApiError as error:
                    assert frontend.journal, "whose entry it is"
                    frontend.journal.forget(entry)
                    output.note(f"a journalled request can no longer be run ({error.message})")
                    continue
                run_entry(entry, make, work, frontend)


def _add_tokens(api: FastAPI, described: Description, frontends: Frontends) -> None:
    kinds = TokenizePrompt, TokenizeChat

    @api.post("/tokenize", summary="Tokenize a text or a conversation.", **described.route(Tokens, kinds))
    async def tokens(request: Request) -> Response:
        data = await read_json(request, MAX_BODY)
        body = parsed(TokenizeChat, data) if "messages" in data else parsed(TokenizePrompt, data)
        return JSONResponse(await asyncio.to_thread(tokenize, body, frontends.of(body.model).model))

    @api.post("/detokenize", summary="Turn tokens into text.", **described.route(DetokenizedText, DetokenizeRequest))
    async def text(request: Request) -> Response:
        body = parsed(DetokenizeRequest, await read_json(request, MAX_BODY))
        return JSONResponse(await asyncio.to_thread(detokenize, body, frontends.of(body.model).model))

    @api.get("/tokenizer_info", summary="A model's tokenizer and chat template.", **described.route(TokenizerInfo))
    async def info(model: str | None = None) -> Response:
        return JSONResponse(await asyncio.to_thread(tokenizer_info, frontends.of(model).model))


def tokenizer_info(model: ServedModel) -> dict[str, object]:
    """Return the special tokens as texts, and the chat template."""
    config, template = model.config("tokenizer_config.json"), model.chat_template
    tokens = {key: config.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {
        "tokenizer_class": config.get("tokenizer_class"),
        "add_bos_token": config.get("add_bos_token"),
        **{key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()},
        "model_max_length": model.spec.longest_request,
        "chat_template": template.source if template else None,
    }


def tokenize(body: TokenizePrompt | TokenizeChat, model: ServedModel) -> dict[str, object]:
    """Return the tokens of a text or of a conversation.

    A text gets special tokens unless the client switches them off.
    """
    if isinstance(body, TokenizePrompt):
        ids = model.encode(body.prompt, body.add_special_tokens is not False)
    else:
        ids = model.encode(prompt_of(body, model), bool(body.add_special_tokens), "messages")
    names = [model.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.spec.longest_request, "tokens": ids, "token_strs": names}


def detokenize(body: DetokenizeRequest, model: ServedModel) -> dict[str, object]:
    """Return the text of tokens, including special tokens.

    Raises ApiError for an id outside the vocabulary; ids that only the tokenizer lacks have no text.
    """
    vocab = max(model.spec.vocab, model.tokenizer.get_vocab_size())
    for token in body.tokens:
        if token >= vocab:
            raise invalid(f"Token ids must be below {vocab}, the size of the vocabulary.", "tokens")
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}
