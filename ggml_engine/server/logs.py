"""What the server writes to its log: one line for each request, with nothing in it that a caller could forge or hide.

Never in a log: keys, headers, query strings, bodies, what was generated.
"""

from __future__ import annotations

import logging
import traceback

log = logging.getLogger("ggml_engine.server")

_MOST = 200


def shown(text: str) -> str:
    """Text of a caller for a line of a log: control characters escaped, and short."""
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:_MOST])
    return escaped + "..." if len(text) > _MOST else escaped


def log_request(method: str, path: str, status: int, seconds: float, request_id: str) -> None:
    """The line of a request."""
    log.info("%s %s %d %.3fs %s", shown(method), shown(path), status, seconds, shown(request_id))


def log_bug(error: BaseException, what: str) -> None:
    """Where an unexpected error came from. Its message may quote a request, so it is left out."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s: %s\n%s", what, type(error).__name__, frames)
