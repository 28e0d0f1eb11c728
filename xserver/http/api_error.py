"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`; no error repeats its input."""

from starlette.responses import JSONResponse

INVALID, RATE_LIMIT, SERVER = "invalid_request_error", "rate_limit_error", "server_error"


class ApiError(Exception):
    """An error for the client: an HTTP status with the reason."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None,
        param: str | None = None,
        kind: str = INVALID,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.kind = status, message, code, param, kind
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, object]:
        """The error's document."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The error's HTTP response."""
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error 400 for an invalid value."""
    return ApiError(400, message, code, param)


def unavailable(message: str, code: str, retry_after_s: int) -> ApiError:
    """Return the error 503 while the engine can't take requests."""
    return ApiError(503, message, code, None, SERVER, {"Retry-After": str(retry_after_s)})
