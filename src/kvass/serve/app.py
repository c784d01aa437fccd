"""The OpenAI-compatible API: what may be asked, by whom, and how it is answered."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json

from kvass import __version__
from kvass.config import Settings
from kvass.engines.transformers import Engine, Sampling, Scope
from kvass.errors import InputError
from kvass.keys import tenant_digest
from kvass.quality import Budget
from kvass.reuse.plan import Reuse
from kvass.serve.common import ERROR_HANDLERS, metrics_page
from kvass.serve.errors import ApiError, error_body
from kvass.serve.guard import ARRIVED, TENANT
from kvass.serve.prompts import ChatEncoder, TooLongError
from kvass.serve.replies import ChatShape, CompletionShape
from kvass.serve.reply import RunResponse
from kvass.serve.run import Asked, Run, Speed
from kvass.serve.scheduler import Busy, Scheduler, Stopping
from kvass.serve.schemas import ChatRequest, CompletionRequest, LossyOptions
from kvass.serve.tenants import Tenants, tenant_salt

log = logging.getLogger("kvass.serve")

_UNIONS = ("content", "prompt", "stop")
"""Fields of several kinds: behind them pydantic names the kind that did not fit."""

_COMPLETION_TOKENS = 16
"""What a completion may have where its request does not say; OpenAI's."""


@dataclass
class Service:
    """What the routes work with."""

    name: str
    created: int
    engine: Engine
    scheduler: Scheduler
    encoder: ChatEncoder
    tenants: Tenants
    settings: Settings
    speed: Speed = field(default_factory=Speed)
    roots: dict[str, bytes] = field(default_factory=dict)

    def salt(self, tenant: str) -> str:
        """The salt of a tenant; of the settings where there are no tenants."""
        return tenant_salt(self.settings, tenant or None)

    def scope(self, tenant: str, options: LossyOptions) -> Scope:
        """What a request of a tenant may load and keep."""
        salts = tuple(self.salt(name) for name in self.tenants.public if name != tenant)
        settings, asked = self.settings, options.budget
        lossy = settings.allow_lossy if options.lossy is None else options.lossy
        budget = Budget.of(settings)._replace(**asked.model_dump(exclude_none=True))
        anywhere = (options.reuse or settings.reuse) == "anywhere"
        most = settings.reuse_max_fraction if options.max_fraction is None else options.max_fraction
        reuse = Reuse(most) if anywhere else None
        return Scope(self.salt(tenant), salts, options.load, options.keep, lossy, budget, reuse)

    def root(self, tenant: str) -> bytes:
        """The root of a tenant's namespace, under which its answers are remembered."""
        if tenant not in self.roots:
            own = msgspec.structs.replace(self.engine.namespace, tenant=tenant_digest(self.salt(tenant)))
            self.roots[tenant] = own.root()
        return self.roots[tenant]

    def sampling(self, body: ChatRequest | CompletionRequest, max_tokens: int) -> Sampling:
        """A request's sampling parameters, with OpenAI's defaults."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
            seed=body.seed,
            stop=body.stops(),
        )

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for another model than the one that is served."""
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"the model {name!r} is not served; {self.name!r} is",
                param="model",
                code="model_not_found",
            )

    def check_length(self, prompt: list[int], param: str) -> None:
        """Raises ApiError for a prompt that is empty or over the model's length."""
        longest = self.engine.max_tokens
        if not prompt:
            raise ApiError(400, "the prompt is empty; give at least one token", param=param)
        if longest is not None and len(prompt) >= longest:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens; the model takes {longest}, answer included",
                param=param, code="context_length_exceeded",
            )  # fmt: skip

    def text(self, tokens: list[int]) -> str:
        """What tokens read, special ones included."""
        text: str = self.engine.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text

    def decode(self, token: int) -> str:
        """A single token's text."""
        return self.text([token])


# -- preparing ----------------------------------------------------------------------------------------


def _asked_chat(service: Service, body: ChatRequest, tenant: str) -> list[Asked]:
    messages = [message.for_template() for message in body.messages]
    root = service.root(tenant)
    prompt, segments = service.encoder.encode_marked(messages, root=root, tools=body.tools)
    service.check_length(prompt, "messages")
    most = body.max_completion_tokens or body.max_tokens or service.engine.max_tokens or 1 << 20
    top = (body.top_logprobs or 0) if body.logprobs else None
    return [Asked(prompt, service.sampling(body, most), body.n or 1, top, None, root, segments)]


def _asked_completion(service: Service, body: CompletionRequest) -> list[Asked]:
    given: Any = body.prompt
    many = not isinstance(given, str) and not isinstance(given[0], int)
    most = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = service.sampling(body, most)
    asked = []
    for one in given if many else [given]:
        ids = service.encoder.text(one, special=body.kvass.special_tokens) if isinstance(one, str) else one
        service.check_length(ids, "prompt")
        echo = None
        if body.echo:
            echo = one if isinstance(one, str) else service.text(ids)
        asked.append(Asked(ids, sampling, body.n or 1, body.logprobs, echo))
    return asked


# -- the app ------------------------------------------------------------------------------------------


def make_app(service: Service) -> FastAPI:
    """The routes over a service."""
    app = FastAPI(
        title="kvass", version=__version__, docs_url=None, redoc_url=None,
        description="OpenAI-compatible completions whose prompts are never read twice.",
    )  # fmt: skip
    app.router.route_class = _Route
    _add_error_shapes(app)

    def tenant(request: Request) -> str:
        """Whose request it is, as the guard found; the empty name where there are no tenants."""
        found: str = request.scope[TENANT]
        return found

    Tenant = Annotated[str, Depends(tenant)]
    errors: dict[int | str, dict[str, Any]] = {
        code: {"description": what}
        for code, what in (
            (400, "Unusable request"), (401, "No valid API key"), (404, "Unknown model"),
            (408, "Too slow"), (413, "Too large"), (429, "Too many requests"), (503, "Stopping"),
        )
    }  # fmt: skip

    async def started(
        request: Request, tenant: str, options: LossyOptions, prepare: Callable[[], list[Asked]], param: str
    ) -> Run:
        try:
            service.scheduler.check_room(tenant)
            asked = await asyncio.to_thread(prepare)
            if sum(one.n for one in asked) > service.settings.serve_queue:
                raise ApiError(400, "more answers are asked for than may queue (serve_queue)", param="n")
            scope, arrived = service.scope(tenant, options), request.scope[ARRIVED]
            run = Run(service.scheduler, service.encoder, service.speed, tenant, scope, asked, arrived)
            run.submit()
        except TooLongError as error:
            raise ApiError(400, str(error), param=param, code="context_length_exceeded") from error
        except InputError as error:
            raise ApiError(400, str(error), param=param) from error
        except Busy as error:
            raise ApiError(429, str(error), headers={"Retry-After": str(error.seconds)}) from error
        except Stopping as error:
            raise ApiError(503, str(error), headers={"Retry-After": "5"}) from error
        return run

    @app.post("/v1/chat/completions", responses=errors)
    async def chat(request: Request, body: ChatRequest, tenant: Tenant) -> Response:
        service.check_model(body.model)
        prepare = partial(_asked_chat, service, body, tenant)
        run = await started(request, tenant, body.kvass, prepare, "messages")
        shape = ChatShape(service.name, service.decode, bool(body.logprobs))
        return _response(run, shape, body)

    @app.post("/v1/completions", responses=errors)
    async def completions(request: Request, body: CompletionRequest, tenant: Tenant) -> Response:
        service.check_model(body.model)
        prepare = partial(_asked_completion, service, body)
        run = await started(request, tenant, body.kvass, prepare, "prompt")
        shape = CompletionShape(service.name, service.decode, body.logprobs is not None)
        return _response(run, shape, body)

    def model() -> dict[str, Any]:
        return {
            "id": service.name, "object": "model", "created": service.created, "owned_by": "kvass",
            "max_model_len": service.engine.max_tokens,
        }  # fmt: skip

    @app.get("/v1/models", responses={401: errors[401]})
    def models(tenant: Tenant) -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}", responses={401: errors[401], 404: errors[404]})
    def one_model(name: str, tenant: Tenant) -> dict[str, Any]:
        service.check_model(name)
        return model()

    @app.get("/healthz", responses={503: {"description": "To be restarted"}})
    def healthz() -> dict[str, str]:
        if service.scheduler.failed:
            raise ApiError(503, "the server failed and answers no request any more; restart it")
        return {"status": "ok"}

    @app.get("/readyz", responses={503: errors[503]})
    def readyz() -> dict[str, str]:
        if not service.scheduler.alive:
            raise ApiError(503, "not ready: the server is stopping")
        return {"status": "ready"}

    @app.get("/metrics", responses={401: errors[401], 403: {"description": "Not the operator's key"}})
    def prometheus(tenant: Tenant) -> Response:
        return metrics_page(service.tenants, tenant)

    return app


def _response(
    run: Run, shape: ChatShape | CompletionShape, body: ChatRequest | CompletionRequest
) -> Response:
    usage = body.stream_options is not None and body.stream_options.include_usage
    return RunResponse(run, shape, stream=bool(body.stream), usage=usage)


class _Request(Request):
    """Reads JSON as the standard has it: no NaN, no half characters, nothing nested without end."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return handle_strictly


def _add_error_shapes(app: FastAPI) -> None:
    for kind, handler in ERROR_HANDLERS.items():
        app.add_exception_handler(kind, handler)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "body"]
        cut = next((number for number, part in enumerate(where) if part in _UNIONS), len(where))
        param = None if first["type"] == "json_invalid" else ".".join(where[: cut + 1]) or None
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "json_invalid":
            what = f"is not JSON: {first['ctx']['error']}"
        message = f"{param}: {what}" if param else f"the body: {what}"
        return JSONResponse(error_body(400, message, param), 400)
