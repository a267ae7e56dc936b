"""Errors as OpenAI's clients read them."""

from typing import Any

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """Becomes an answer with ``status`` and OpenAI's error body.

    ``retry_after``: seconds, sent as the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, fallback)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
