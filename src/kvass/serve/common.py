"""What every app of the server has: its metrics, its errors as JSON, and noticing that a client went away."""

from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from kvass import metrics
from kvass.serve.errors import FAULT, ApiError, error_body
from kvass.serve.tenants import OPERATOR, Tenants


def metrics_page(tenants: Tenants, tenant: str) -> Response:
    """All metrics as Prometheus reads them. Raises ApiError for who may not see them."""
    if tenants and tenant != OPERATOR:
        raise ApiError(403, f"metrics concern all tenants; use a key of the tenant {OPERATOR!r}")
    return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def until_gone(receive: Receive) -> None:
    """Wait until a client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, error.headers)


async def _fault(_: Request, error: Exception) -> Response:  # which goes on to the guard, and to the log
    return JSONResponse(error_body(500, FAULT), 500)


ERROR_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _api_error,
    HTTPException: _http_error,
    Exception: _fault,
}
"""How errors are answered, by their class."""
