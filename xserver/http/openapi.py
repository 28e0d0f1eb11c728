"""/openapi.json: descriptions of the routes' bodies and answers.

FastAPI can't derive them, because `xserver.http.body` reads the bodies.
"""

from typing import TypedDict

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from xserver.http.responses import ErrorResponse

_COMPONENTS = "#/components/schemas/"
_ADMIN_TOKEN = {"type": "apiKey", "in": "header", "name": "X-Admin-Token", "description": "See --admin-token-file."}
Models = type[BaseModel] | tuple[type[BaseModel], ...]


class RouteArguments(TypedDict, total=False):
    """Arguments of FastAPI's routes."""

    responses: dict[int | str, dict[str, object]]
    openapi_extra: dict[str, object]
    status_code: int


class Description:
    """Describes routes, and collects the schemas that they refer to."""

    def __init__(self) -> None:
        self._models: set[type[BaseModel]] = {ErrorResponse}
        self._administered = False

    @property
    def errors(self) -> dict[int | str, dict[str, object]]:
        """The errors of every route."""
        return {
            "4XX": {"description": "The request can't be answered.", "content": self._json(ErrorResponse)},
            "5XX": {"description": "The server can't answer.", "content": self._json(ErrorResponse)},
        }

    def route(
        self, answer: Models, body: Models | None = None, events: type[BaseModel] | None = None
    ) -> RouteArguments:
        """Return the arguments of a route that returns an `answer` for a `body`, or a stream of `events`."""
        content = self._json(answer)
        if events is not None:
            content["text/event-stream"] = {"schema": {"description": "JSON events, then [DONE]."}}
            self._models.add(events)
        route: RouteArguments = {"responses": {200: {"content": content, "description": "The answer."}}}
        if body is not None:
            route["openapi_extra"] = {"requestBody": {"required": True, "content": self._json(body)}}
        return route

    def administration(self, answer: Models, body: Models | None = None) -> RouteArguments:
        """Return the arguments of a route for administrators that accepts a change and applies it later."""
        self._administered = True
        route = self.route(answer, body)
        route["responses"] = {202: route["responses"][200]}
        route["openapi_extra"] = {**route.get("openapi_extra", {}), "security": [{"AdminToken": []}]}
        route["status_code"] = 202
        return route

    def complete(self, api: FastAPI) -> None:
        """Add all schemas to the application's document."""
        made = api.openapi

        def openapi() -> dict[str, object]:
            document = made()
            ordered = sorted(self._models, key=lambda model: model.__name__)
            _, schemas = models_json_schema(
                [(model, "validation") for model in ordered], ref_template=_COMPONENTS + "{model}"
            )
            components = document.setdefault("components", {})
            components["schemas"] = schemas["$defs"]
            if self._administered:
                components["securitySchemes"] = {"AdminToken": _ADMIN_TOKEN}
            return document

        api.openapi = openapi  # type: ignore[method-assign]

    def _json(self, models: Models) -> dict[str, object]:
        several = models if isinstance(models, tuple) else (models,)
        self._models.update(several)
        refs = [{"$ref": _COMPONENTS + model.__name__} for model in several]
        return {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}
