"""What stands before every endpoint: who may ask, what a request may look like, and its end.

`Guard` refuses by default: a route needs the key because nothing says that it does not. It owns the order of the
checks, and that a client which leaves cancels its request, in every state of it. Does not know: how a body is read
(`bodies`), what an endpoint does, and the limits of lines and headers (`transport`).
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ggml_engine.server.bodies import Bodies, BodyReader
from ggml_engine.server.errors import CLIENT_GONE, HttpProblem, dialect_of, problem_of, render
from ggml_engine.server.hosts import HostRule
from ggml_engine.server.keys import ApiKeys, presented_key
from ggml_engine.server.lifecycle import Lifecycle
from ggml_engine.server.logs import log_bug, log_request
from ggml_engine.server.routing import route_of

OPEN_PATHS: Final = frozenset({"/health"})  # everything else needs the key, where there are keys
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)

OnRequest = Callable[[str, str, int, float], None]


@dataclass(frozen=True, slots=True)
class GuardRules:
    """What a guard checks."""

    keys: ApiKeys
    hosts: HostRule
    bodies: Bodies


class Guard:
    """ASGI middleware around the router; see the module.

    `on_request(route, method, status, seconds)` is told of every response. `state` is what every `request.state` has,
    beside the caller's `partition` and the `request_id`.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: GuardRules,
        lifecycle: Lifecycle,
        on_request: OnRequest,
        state: Mapping[str, object],
    ) -> None:
        self._app = app
        self._state = state
        self._rules = rules
        self._lifecycle = lifecycle
        self._on_request = on_request
        self._running_ids: set[tuple[str, str]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifespan; a websocket is refused."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _Exchange(self, scope, receive, send).run()


class _Exchange:
    """One request and its response."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard = guard
        self._scope = scope
        self._receive = receive
        self._send = send
        self._status = 0
        self._headers = Headers(scope=scope)
        self._request_id = f"req_{secrets.token_hex(12)}"
        self._body = BodyReader(guard._rules.bodies, self._headers, receive)

    async def run(self) -> None:
        begun = time.monotonic()
        try:
            await self._answer()
        finally:
            seconds = time.monotonic() - begun
            status = self._status or CLIENT_GONE
            self._guard._on_request(route_of(self._scope), self._scope["method"], status, seconds)
            log_request(self._scope["method"], self._scope["path"], status, seconds, self._request_id)

    async def _answer(self) -> None:
        try:
            partition = self._admit()
            held = self._hold_id(partition)
            try:
                with self._guard._rules.bodies.holding(partition) as body:
                    await self._watched(partition, await self._body.read(body))
            finally:
                self._guard._running_ids.discard(held)
        except Exception as error:
            await self._fail(error)

    # ---- who may ask, and what a request looks like

    def _admit(self) -> str:
        """The partition of the caller. Raises HttpProblem."""
        rules, headers, scope = self._guard._rules, self._headers, self._scope
        hosts = headers.getlist("host")
        if len(hosts) > 1 or not rules.hosts.allows(hosts[0] if hosts else None):
            raise HttpProblem(
                403, "host_not_allowed", "this server does not answer to that Host (see its option allowed_hosts)"
            )
        partition = self._identify()
        if self._guard._lifecycle.is_closing:
            raise HttpProblem(503, "shutting_down", "the server is shutting down", headers={"Connection": "close"})
        if scope["method"] in _WITH_BODY:
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise HttpProblem(415, "content_type", "the Content-Type must be application/json")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise HttpProblem(415, "content_encoding", "bodies are taken as they are, without a Content-Encoding")
        return partition

    def _identify(self) -> str:
        keys, scope = self._guard._rules.keys, self._scope
        if not keys:
            return ""
        is_open = scope["path"] in OPEN_PATHS and scope.get("raw_path", b"").decode("latin-1") in ("", scope["path"])
        key = presented_key(self._headers)
        partition = None if key is None else keys.partition_of(key)
        if partition is None and not is_open:
            raise HttpProblem(
                401,
                "invalid_api_key",
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return partition or ""

    def _hold_id(self, partition: str) -> tuple[str, str]:
        """Take the request's id; the caller's own (X-Request-ID) may run once at a time."""
        given = self._headers.get("x-request-id")
        if given is not None:
            if not _REQUEST_ID.fullmatch(given):
                raise HttpProblem(400, "request_id", "X-Request-ID takes 1 to 128 of A-Z, a-z, 0-9, '.', '_' and '-'")
            if (partition, given) in self._guard._running_ids:
                raise HttpProblem(400, "duplicate_request_id", "a request with this X-Request-ID is running")
            self._request_id = given
        held = (partition, self._request_id)
        self._guard._running_ids.add(held)
        return held

    # ---- the endpoint

    async def _watched(self, partition: str, body: bytes) -> None:
        """Run the endpoint, and cancel it when the client leaves or the server closes."""
        known = {"partition": partition, "request_id": self._request_id}
        self._scope["state"] = {**self._scope.get("state", {}), **self._guard._state, **known}
        gone = asyncio.Event()
        inner = asyncio.ensure_future(self._endpoint(_replayed(body, gone)))
        watcher = asyncio.ensure_future(self._until_disconnect())
        lifecycle = self._guard._lifecycle
        with lifecycle.running(inner):
            try:
                await asyncio.wait({inner, watcher}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                left = not inner.done()
                gone.set()
                watcher.cancel()
                if left:
                    inner.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({inner, watcher})
                if watcher.done() and not watcher.cancelled():
                    watcher.exception()  # a `receive` that raises is a client that left
        if inner.cancelled():
            if left:
                raise HttpProblem(CLIENT_GONE, "client_gone", "the client left")
            raise HttpProblem(503, "shutting_down", "the server is shutting down", headers={"Connection": "close"})
        inner.result()

    async def _endpoint(self, receive: Receive) -> None:
        async with AsyncExitStack() as stack:  # what the request holds until its response has been sent
            self._scope["state"]["stack"] = stack
            await self._guard._app(self._scope, receive, self._sending)

    async def _until_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # ---- the response

    async def _sending(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            identifier = self._request_id.encode("ascii")
            headers = [*message.get("headers", []), *((name, identifier) for name in self._id_names())]
            message = {**message, "headers": headers}
        await self._send(message)

    def _id_names(self) -> tuple[bytes, ...]:
        """Headers with the request's id: Anthropic's clients read one of another name."""
        own = (b"x-request-id",)
        return (*own, b"request-id") if dialect_of(self._scope["path"]) == "anthropic" else own

    async def _fail(self, error: Exception) -> None:
        if isinstance(error, HTTPException):
            error = HttpProblem(error.status_code, _CODES.get(error.status_code, "http"), _sentence(error))
        problem = problem_of(error)
        if problem.code == "internal_error" and problem is not error:  # else who made it has logged it
            log_bug(error, "an endpoint failed")
        if problem.status == CLIENT_GONE:
            return
        if self._status:  # the response has begun: it must not end as if it were whole
            abort = self._scope.get("state", {}).get("abort_connection")
            if abort is not None:
                abort()
            return
        if not self._body.is_read:
            if problem.code != "body_timeout":
                await self._body.discard()
            if not self._body.is_read and self._body.is_announced:
                problem.headers["Connection"] = "close"
        await render(problem, self._scope["path"])(self._scope, self._receive, self._sending)


_CODES: Final = {404: "not_found", 405: "method_not_allowed"}


def _sentence(error: HTTPException) -> str:
    return {404: "there is nothing at this path", 405: "this path does not take that method"}.get(
        error.status_code, str(error.detail)
    )


def _replayed(body: bytes, gone: asyncio.Event) -> Receive:
    """A `receive` that gives the body once, and then waits for the end."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive
