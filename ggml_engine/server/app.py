"""`create_app`: the ASGI application. Puts the routes behind the guard; a route that is added is guarded by that."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route

from ggml_engine.errors import OptionError
from ggml_engine.server import basics, dialects, embeddings, sessions, tokens
from ggml_engine.server.bodies import Bodies
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.guard import Guard, GuardRules
from ggml_engine.server.hosted_model import LOAD_ERRORS, Loader
from ggml_engine.server.hosting import ModelHost
from ggml_engine.server.hosts import HostRule, is_loopback
from ggml_engine.server.keys import ApiKeys, load_keys
from ggml_engine.server.lifecycle import Lifecycle
from ggml_engine.server.loader import EngineLoader, budget_of
from ggml_engine.server.logs import log
from ggml_engine.server.metrics import Metrics, metrics
from ggml_engine.server.options import ServeOptions, ServerOptions
from ggml_engine.server.turns import Turns
from ggml_engine.server.workers import Workers

_SESSION_THREADS: Final = 4  # forks, rewinds, saves and loads of sessions at once
_TOKEN_THREADS: Final = 2  # texts at once that are read or written for nothing else than their tokens
_EMBEDDINGS_AT_ONCE: Final = 4
ROUTES: Final[tuple[Route, ...]] = (
    Route("/health", basics.health, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/v1/models", basics.models, methods=["GET"]),
    Route("/v1/models/{name:path}", basics.model, methods=["GET"]),
    Route("/tokenize", tokens.tokenize, methods=["POST"]),
    Route("/detokenize", tokens.detokenize, methods=["POST"]),
    Route("/v1/embeddings", embeddings.embeddings, methods=["POST"]),
    Route("/models", basics.models, methods=["GET"]),  # without /v1: as llama.cpp's clients ask
    Route("/embeddings", embeddings.embeddings, methods=["POST"]),
    *sessions.routes(),
)


def check_exposure(options: ServerOptions, keys: ApiKeys) -> None:
    """Raise OptionError for a server that everybody could use."""
    if not keys and not is_loopback(options.host) and not options.public_without_key:
        raise OptionError(
            f"host={options.host!r} lets others reach the server, and there is no key: set the environment variable "
            f"{options.api_key_env or 'of api_key_env'} or api_key_file, or public_without_key"
        )


def create_app(
    options: ServeOptions,
    *,
    loader: Loader | None = None,
    routes: Sequence[Route] | None = None,
    on_failed_start: Callable[[BaseException], object] | None = None,
) -> Starlette:
    """The application of a server. `loader` and `routes` replace what loads models and what is served, for tests.

    The first model is loaded when it starts; where it cannot be, `on_failed_start` is told. Raises OptionError.
    """
    server = options.server
    keys = load_keys(server.api_key_env, server.api_key_file)
    check_exposure(server, keys)
    budget = budget_of(options)
    lifecycle = Lifecycle()
    state: dict[str, Any] = {"options": server, "lifecycle": lifecycle, "since": time.time()}
    bodies = Bodies(server.max_body_bytes, server.bodies_bytes, server.body_timeout_s)
    rules = GuardRules(keys, HostRule(server.host, server.allowed_hosts, has_keys=bool(keys)), bodies)
    host = ModelHost(
        server.models,
        loader or EngineLoader(options, budget),
        budget=budget,
        idle_s=server.model_idle_s,
        any_model=server.any_model,
    )
    state["host"] = host
    state["saving"] = threading.Lock()
    state["session_workers"] = session_workers = Workers(_SESSION_THREADS, "ggml-engine-sessions")
    state["token_workers"] = token_workers = Workers(_TOKEN_THREADS, "ggml-engine-tokens")
    state["embedding_workers"] = embedding_workers = Workers(_EMBEDDINGS_AT_ONCE, "ggml-engine-embeddings")
    all_workers = (session_workers, token_workers, embedding_workers)
    turns = {
        "tokens": Turns(_TOKEN_THREADS, options.serving.max_queue),
        "embeddings": Turns(_EMBEDDINGS_AT_ONCE, options.serving.max_queue),
    }
    state["token_turns"], state["embedding_turns"] = turns["tokens"], turns["embeddings"]
    state["metrics"] = measured = Metrics(host, lifecycle, turns)
    state["started"] = started = asyncio.Event()

    async def start() -> None:
        try:
            async with host.use():
                started.set()
        except HttpProblem as problem:
            log.error("the first model cannot be loaded: %s", problem.message)
            cause = problem.__cause__ or problem
            if on_failed_start is not None and isinstance(cause, (HttpProblem, *LOAD_ERRORS)):
                on_failed_start(cause)  # after anything else the next request tries again

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(start()), asyncio.create_task(host.watch_idle())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
            for workers in all_workers:
                workers.close()

    app = Starlette(
        routes=[*ROUTES, *dialects.routes()] if routes is None else list(routes),
        middleware=[Middleware(Guard, rules=rules, lifecycle=lifecycle, on_request=measured.on_request, state=state)],
        exception_handlers={HTTPException: _raise},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.host = host
    app.state.lifecycle = lifecycle
    app.state.started = started
    app.state.bodies = bodies
    app.state.workers = all_workers
    app.state.token_turns, app.state.embedding_turns = turns["tokens"], turns["embeddings"]
    return app


def _raise(_request: Request, error: Exception) -> NoReturn:
    raise error  # the guard renders it
