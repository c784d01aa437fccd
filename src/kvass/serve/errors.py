"""Errors as an OpenAI client expects them: a status, and a body that says what is wrong with which field."""

from typing import Any

NO_KEY = "no valid API key; send it as 'Authorization: Bearer KEY'"

FAULT = "the server failed to answer; its log says why"


class ApiError(Exception):
    """An answer other than 200. `param` names the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = error_body(status, message, param, code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
