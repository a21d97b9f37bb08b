"""`EventStream`: a response of server-sent events, filled from the engine's threads and never waiting for its reader.

At most `MAX_PARTS` events wait for the socket. A reader that is slower than that is given up: its generation is
cancelled, and nobody else notices. Whatever ends a stream early, its last events say so; it is never cut off in
silence.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ggml_engine.server.errors import HttpProblem, dialect_of
from ggml_engine.server.lifecycle import Lifecycle
from ggml_engine.server.logs import log_bug
from ggml_engine.server.timeouts import timeout

MAX_PARTS: Final = 256
DONE: Final = "[DONE]"

RenderError = Callable[[HttpProblem], tuple[str | None, Mapping[str, Any]]]


def event_text(data: str, event: str | None = None) -> str:
    """One event as it is sent. `data` is one line."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {data}\n\n"


class EventStream(Response):
    """See the module. Made on the event loop's thread; `put`, `comment`, `finish` and `fail` may be called on any.

    `on_cancel` ends the generation behind it: called at most once, when the client leaves, reads too slowly, or the
    server closes, and not after `finish` or `fail`. `done` is the data of the last event, None for a dialect that has
    none. `render_error` gives the event of a failure: its name and its data; by default those of the request's dialect.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        on_cancel: Callable[[], object],
        *,
        done: str | None = DONE,
        render_error: RenderError | None = None,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, headers)
        del self.headers["content-length"]
        self._dialect = dialect_of(request.url.path)
        self._loop = asyncio.get_running_loop()
        self._on_cancel = on_cancel
        self._last = [] if done is None else [event_text(done)]
        self._render_error = render_error or self._plain_error
        self._lifecycle: Lifecycle = request.state.lifecycle
        self._write_timeout_s: float = request.state.options.write_timeout_s
        self._lock = threading.Lock()
        self._parts: deque[str] = deque()
        self._is_over = False
        self._was_woken = False
        self._woken = asyncio.Event()

    # ---- filling it, on any thread

    def put(self, data: str | Mapping[str, Any], event: str | None = None) -> bool:
        """Add an event; a mapping is sent as JSON. False where nobody wants it any more. Never waits."""
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return self._add(event_text(text, event))

    def comment(self, text: str) -> bool:
        """Add a line that clients ignore: a sign of life, or progress. Left out where the reader lags."""
        with self._lock:
            if len(self._parts) >= MAX_PARTS // 2:
                return not self._is_over
        return self._add(f": {text}\n\n")

    def finish(self) -> None:
        """The stream is whole: the last event, and the end."""
        self._end(self._last)

    def fail(self, problem: HttpProblem) -> None:
        """The stream ends with an error: an event that says which, and the last event."""
        self._end_with(problem)

    def _end_with(self, problem: HttpProblem) -> bool:
        try:
            event, data = self._render_error(problem)
            text = event_text(json.dumps(data), event)
        except Exception as error:  # the stream has to end, and to say so
            log_bug(error, "an error of a stream could not be written")
            event, data = self._plain_error(problem)
            text = event_text(json.dumps(data), event)
        return self._end([text, *self._last])

    def _plain_error(self, problem: HttpProblem) -> tuple[str | None, Mapping[str, Any]]:
        return ("error" if self._dialect == "anthropic" else None, problem.body(self._dialect))

    def _add(self, text: str) -> bool:
        with self._lock:
            if self._is_over:
                return False
            is_full = len(self._parts) >= MAX_PARTS
            if not is_full:
                self._parts.append(text)
        if is_full:
            self._give_up(HttpProblem(408, "slow_reader", f"more than {MAX_PARTS} events were waiting to be read"))
            return False
        self._wake()
        return True

    def _end(self, last: list[str]) -> bool:
        with self._lock:
            if self._is_over:
                return False
            self._is_over = True
            self._parts.extend(last)
        self._wake()
        return True

    def _give_up(self, problem: HttpProblem) -> None:
        """End the stream and the generation behind it."""
        if self._end_with(problem):
            self._on_cancel()

    def _wake(self) -> None:
        with self._lock:
            if self._was_woken:
                return
            self._was_woken = True
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:  # the loop has ended: so has the reader
            with self._lock:
                self._is_over = True

    # ---- sending it, on the event loop

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Send until the end; the guard cancels this when the client leaves."""
        shutting_down = HttpProblem(503, "shutting_down", "the server is shutting down")
        try:
            with self._lifecycle.ending_with(lambda: self._give_up(shutting_down)):
                await self._sent(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                while True:
                    await self._woken.wait()
                    text, is_over = self._take()
                    body = {"type": "http.response.body", "body": text.encode("utf-8"), "more_body": not is_over}
                    await self._sent(send, body)
                    if is_over:
                        return
        except asyncio.TimeoutError:
            self._abandon()
            abort = scope.get("state", {}).get("abort_connection")
            if abort is None:
                raise HttpProblem(408, "slow_reader", "the client did not read its stream") from None
            abort()
        except BaseException:
            self._abandon()
            raise

    async def _sent(self, send: Send, message: dict[str, Any]) -> None:
        async with timeout(self._write_timeout_s):
            await send(message)

    def _take(self) -> tuple[str, bool]:
        with self._lock:
            text = "".join(self._parts)
            self._parts.clear()
            self._was_woken = False
            self._woken.clear()
            return text, self._is_over

    def _abandon(self) -> None:
        with self._lock:
            was_over, self._is_over = self._is_over, True
            self._parts.clear()
        if not was_over:
            self._on_cancel()
