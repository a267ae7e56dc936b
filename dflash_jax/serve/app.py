"""The HTTP application: routes, the API key, and errors as OpenAI's clients read them."""

import contextlib
import hashlib
import hmac
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_jax.serve.api import GONE, Api, ApiConfig
from dflash_jax.serve.async_engine import AsyncEngine
from dflash_jax.serve.errors import ApiError
from dflash_jax.serve.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/ready"})


def create_app(engine: AsyncEngine, metrics: Metrics, config: ApiConfig) -> Starlette:
    """The application over ``engine``, which it starts with its own lifespan."""
    api = Api(engine, metrics, config)
    post: list[tuple[str, Any]] = [
        ("/v1/chat/completions", api.chat),
        ("/v1/completions", api.completions),
        ("/generate", api.generate),
        ("/tokenize", api.tokenize),
        ("/detokenize", api.detokenize),
        ("/abort", api.abort),
        ("/abort_request", api.abort),
    ]
    get: list[tuple[str, Any]] = [
        ("/v1/models", api.models),
        ("/v1/models/{model:path}", api.model),
        ("/health", api.health),
        ("/ready", api.ready),
        ("/metrics", api.metrics_page),
        ("/version", api.version),
        ("/server_info", api.server_info),
        ("/get_server_info", api.server_info),
    ]
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in post]
    routes += [Route(path, endpoint, methods=["GET"]) for path, endpoint in get]
    routes.append(Route("/flush_cache", api.flush_cache, methods=["GET", "POST"]))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield

    def refused(_: HttpRequest, error: Exception) -> Response:
        answer = ApiError(500, "internal error; the server's log has the details")
        if isinstance(error, HTTPException):
            answer = ApiError(error.status_code, error.detail)
        elif isinstance(error, ApiError):
            answer = error
        metrics.rejected.labels(str(answer.status)).inc()
        return JSONResponse(answer.body(), answer.status, headers=answer.headers)

    def gone(_: HttpRequest, error: Exception) -> Response:
        return Response(status_code=GONE)  # left while sending its body

    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(RequireKey, key=config.api_key)] if config.api_key else [],
        exception_handlers={
            ApiError: refused,
            HTTPException: refused,
            ClientDisconnect: gone,
            500: refused,
        },
    )


class RequireKey:
    """401 without the bearer token, on every path but /health and /ready."""

    def __init__(self, app: ASGIApp, key: str):
        self._app = app
        self._digest = hashlib.sha256(b"Bearer " + key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            # Digests: their comparison takes the same time whatever the key's length.
            if not hmac.compare_digest(hashlib.sha256(given).digest(), self._digest):
                error = ApiError(401, "wrong or missing API key", code="invalid_api_key")
                headers = {"WWW-Authenticate": "Bearer"}
                await JSONResponse(error.body(), 401, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)
