"""`HttpProblem`: an answer that is an error, and what the engine's errors are in HTTP.

A problem is rendered in the shape of the dialect that was spoken: OpenAI's `{"error": {...}}`, or Anthropic's
`{"type": "error", "error": {...}}` below `/v1/messages`. Messages are for the caller: what is not the caller's business
(paths of this machine, bugs) is in the log alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from starlette.responses import JSONResponse, Response

from ggml_engine.errors import (
    CancelledError,
    ChatTemplateError,
    ClosedError,
    ContextLengthError,
    EngineError,
    InputError,
    OptionError,
    PoisonedError,
    PoolFullError,
    PositionError,
    QueueFullError,
    RewindError,
    SavedStateError,
    SessionBusyError,
    SessionError,
    SessionLimitError,
    UnknownSessionError,
)

Dialect = Literal["openai", "anthropic"]

CLIENT_GONE: Final = 499  # as nginx counts a request whose client has left; nobody receives it

_OPENAI_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class HttpProblem(Exception):  # noqa: N818 - what it is called in HTTP (RFC 9457), and no fault of the server
    """A request that is answered with an error.

    `code` is a short stable name, `param` the field of the request that it is about, `details` further members of
    OpenAI's error object. `retry_after_s` becomes the header Retry-After.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        self.details = dict(details or {})

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """The error as the dialect has it, ready for JSON."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        if dialect == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, other if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self._anthropic_message()}}
        kind = _OPENAI_TYPES.get(self.status, other)
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.details}
        }

    def _anthropic_message(self) -> str:
        """In this dialect agents know by these words alone that a conversation is to be made shorter."""
        if self.code != "context_length_exceeded":
            return self.message
        if "n_prompt_tokens" not in self.details:
            return f"prompt is too long: {self.message}"
        return f"prompt is too long: {self.details['n_prompt_tokens']} tokens > {self.details['n_ctx']} maximum"


def dialect_of(path: str) -> Dialect:
    """Which dialect is spoken at a path."""
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


def render(problem: HttpProblem, path: str) -> Response:
    """The whole response to a request of `path`."""
    return JSONResponse(problem.body(dialect_of(path)), problem.status, headers=problem.headers)


# ---- the engine's errors

_SAVED_STATUS: Final = {"name": 400, "missing": 404, "io": 500, "other-model": 409}


def _context_length(error: Any) -> HttpProblem:
    details = {"n_prompt_tokens": error.requested, "n_ctx": error.limit}
    return HttpProblem(400, "context_length_exceeded", str(error), details=details)


def _saved_state(error: Any) -> HttpProblem:
    # its message names files of this machine
    return HttpProblem(_SAVED_STATUS.get(error.code, 400), f"saved_state_{error.code}", error.reason)


_MAPPING: Final[tuple[tuple[type[EngineError], Callable[[Any], HttpProblem]], ...]] = (
    (QueueFullError, lambda e: HttpProblem(429, "queue_full", str(e), retry_after_s=e.retry_after_s)),
    (ContextLengthError, _context_length),
    (ChatTemplateError, lambda e: HttpProblem(400, "chat_template_error", str(e))),
    (InputError, lambda e: HttpProblem(400, "invalid_value", str(e))),
    (OptionError, lambda e: HttpProblem(400, "invalid_value", str(e))),
    (SessionBusyError, lambda e: HttpProblem(409, "session_busy", str(e))),
    (UnknownSessionError, lambda e: HttpProblem(404, "session_not_found", str(e))),
    (SessionLimitError, lambda e: HttpProblem(503, "session_limit", str(e), retry_after_s=1)),
    (PoisonedError, lambda e: HttpProblem(409, "session_poisoned", str(e))),
    (PositionError, lambda e: HttpProblem(400, "invalid_position", str(e))),
    (SessionError, lambda e: HttpProblem(409, "session_error", str(e))),
    (RewindError, lambda e: HttpProblem(400, "rewind_refused", str(e))),
    (PoolFullError, lambda e: HttpProblem(503, "out_of_cells", str(e), retry_after_s=1)),
    (SavedStateError, _saved_state),
    (ClosedError, lambda _: HttpProblem(503, "shutting_down", "the server, or this model, is being closed")),
    (CancelledError, lambda _: HttpProblem(CLIENT_GONE, "cancelled", "the request was cancelled")),
)


def problem_of(error: BaseException) -> HttpProblem:
    """What an error is in HTTP; one that is not known is a 500 that tells nothing but its kind."""
    if isinstance(error, HttpProblem):
        return error
    for kind, make in _MAPPING:
        if isinstance(error, kind):
            return make(error)
    if isinstance(error, EngineError):
        return HttpProblem(500, "engine_error", f"the engine failed: {type(error).__name__}: {error}")
    if isinstance(error, TimeoutError):
        return HttpProblem(503, "timeout", "the engine did not answer in time", retry_after_s=1)
    if isinstance(error, MemoryError):
        return HttpProblem(503, "out_of_memory", "there is not enough memory for this request")
    return internal_error()


def internal_error() -> HttpProblem:
    """A 500 for a bug: what it was is for the log alone."""
    return HttpProblem(500, "internal_error", "an internal error; the server's log says which")
