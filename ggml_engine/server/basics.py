"""GET /health and GET /v1/models."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ggml_engine.server.hosting import ModelHost


async def health(request: Request) -> Response:
    """200 `{"status": "ok"}`; 503 until a model was loaded, with the reason where that failed. Waits for nothing."""
    host: ModelHost = request.state.host
    if request.state.started.is_set() or host.n_loads:
        return JSONResponse({"status": "ok"})
    if host.failure is not None and not host.is_loading(host.default):
        return JSONResponse({"status": "error", "error": host.failure.message}, 503)
    return JSONResponse({"status": "loading model"}, 503, headers={"Retry-After": "1"})


async def models(request: Request) -> Response:
    """All models, in the form of OpenAI's list and of Anthropic's at once."""
    host: ModelHost = request.state.host
    found = [_entry(request, name) for name in host.names]
    return JSONResponse(
        {"object": "list", "data": found, "has_more": False, "first_id": host.names[0], "last_id": host.names[-1]}
    )


async def model(request: Request) -> Response:
    """One of them."""
    return JSONResponse(_entry(request, request.state.host.named(request.path_params["name"])))


def _entry(request: Request, name: str) -> dict[str, Any]:
    host: ModelHost = request.state.host
    since = request.state.since
    is_loaded = any(loaded.name == name for loaded in host.loaded())
    return {
        "id": name,
        "object": "model",
        "created": int(since),
        "owned_by": "ggml-engine",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(since, timezone.utc).isoformat(timespec="seconds"),
        "status": "loaded" if is_loaded else "loading" if host.is_loading(name) else "unloaded",
    }
