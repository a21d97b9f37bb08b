"""/v1/sessions: the named sessions of a caller, forked, rewound, saved, loaded and closed.

What one key names, another cannot see. Saved sessions lie in directories of their key and model below the option
`session_directory`, and take no more than `session_quota` bytes together. What waits for an engine or a disk does so on
threads for that alone (`session_workers`): neither it nor the loading of a model waits for the other.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ggml_engine.control.saved_names import SUFFIX, names_in, path_of
from ggml_engine.server.bodies import read_json
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.hosted_model import HostedModel, gib
from ggml_engine.server.validation import RequestModel, validated

SESSION_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", re.ASCII)
NAME_RULE: Final = "a session's name has 1 to 128 characters of A-Z a-z 0-9 . _ - and begins with no dot"
_WAIT_S: Final = 30.0
_HEADER_BYTES: Final = 1 << 16  # of a saved file, beside its K/V


def checked_name(name: str, param: str = "name") -> str:
    """A session's name. Raises HttpProblem 400 for what is none."""
    if not SESSION_NAME.fullmatch(name):
        raise HttpProblem(400, "session_name", NAME_RULE, param)
    return name


class AboutSession(RequestModel):
    """The model that the session is of; by default the first."""

    model: str | None = None


class Fork(AboutSession):
    """A new name, and how many tokens it shares (None: all)."""

    name: Annotated[str, AfterValidator(lambda name: checked_name(name))]  # noqa: PLW0108 - pydantic would give its own to `param`
    at: int | None = Field(None, ge=1)


class Rewind(AboutSession):
    """The position to go back to."""

    to: int = Field(ge=1)


class Stored(AboutSession):
    """The name of the file; by default that of the session."""

    file: str | None = None


Body = TypeVar("Body", bound=AboutSession)
Result = TypeVar("Result")


@asynccontextmanager
async def _called(request: Request, kind: type[Body]) -> AsyncIterator[tuple[str, Body, HostedModel]]:
    """The session's name, the body, and the model while it is kept. Raises HttpProblem for what is none of these."""
    name = checked_name(request.path_params["name"])
    body = validated(kind, await read_json(request))
    async with request.state.host.use(body.model) as model:
        yield name, body, model


async def _in_thread(request: Request, function: Callable[[], Result]) -> Result:
    """What it makes, in a thread for sessions. A caller that leaves does not end it: until then the model is kept."""
    call = asyncio.ensure_future(request.state.session_workers.call(function))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait({call})
        if not call.cancelled():
            call.exception()  # nobody else looks at it
        raise


def _shown(model: HostedModel, info: Any) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "session",
        "model": model.name,
        "position": info.position,
        "busy": info.is_busy,
    }


async def list_sessions(request: Request) -> Response:
    """Those of a model that is loaded (`?model=`, by default the first), and the names that are saved."""
    host, partition = request.state.host, request.state.partition
    name = host.named(request.query_params.get("model"))
    found = []
    for model in host.loaded():
        if model.name == name:
            found = [_shown(model, info) for info in model.runtime.sessions(partition)]
    saved = []
    if request.state.options.session_directory is not None:
        saved = await request.state.session_workers.call(lambda: names_in(_directory(request, name)))
    return JSONResponse({"object": "list", "data": found, "saved": saved})


async def fork(request: Request) -> Response:
    """A further session that shares the first tokens of this one, which may be in use."""
    partition = request.state.partition
    async with _called(request, Fork) as (name, body, model):
        info = await _in_thread(
            request, lambda: model.runtime.fork(partition, name, body.name, body.at, timeout=_WAIT_S)
        )
    return JSONResponse(_shown(model, info))


async def rewind(request: Request) -> Response:
    """Go back to a position."""
    partition = request.state.partition
    async with _called(request, Rewind) as (name, body, model):
        info = await _in_thread(request, lambda: model.runtime.rewind(partition, name, body.to, timeout=_WAIT_S))
    return JSONResponse(_shown(model, info))


async def save(request: Request) -> Response:
    """Write it to a file."""
    async with _called(request, Stored) as (name, body, model):
        directory, file = _directory(request, model.name), name if body.file is None else body.file
        path = path_of(directory, file)  # before anything is measured
        await _in_thread(request, lambda: _save(request, model, name, directory, file, path))
    return JSONResponse({"id": name, "object": "session.saved", "file": file, "model": model.name})


def _save(request: Request, model: HostedModel, name: str, directory: Path, file: str, path: Path) -> None:
    with request.state.saving:  # so that two cannot both find room for one
        _save_alone(request, model, name, directory, file, path)


def _save_alone(request: Request, model: HostedModel, name: str, directory: Path, file: str, path: Path) -> None:
    partition = request.state.partition
    positions = [info.position for info in model.runtime.sessions(partition) if info.name == name]
    needed = (positions[0] if positions else 0) * model.engine.executor.bytes_per_cell + _HEADER_BYTES
    taken = saved_bytes(request.state.options.session_directory) - (path.stat().st_size if path.exists() else 0)
    quota = request.state.options.session_quota
    if taken + needed > quota:
        raise HttpProblem(
            507,
            "session_quota",
            f"the session takes about {gib(needed)}, {gib(max(0, quota - taken))} of session_quota are left",
        )
    model.runtime.save(partition, name, directory, file, timeout=_WAIT_S)


async def load(request: Request) -> Response:
    """Make what was saved a session of this name, in the place of an idle one."""
    async with _called(request, Stored) as (name, body, model):
        directory, file = _directory(request, model.name), name if body.file is None else body.file
        path_of(directory, file)
        info = await _in_thread(
            request, lambda: model.runtime.load(request.state.partition, name, directory, file, timeout=_WAIT_S)
        )
    return JSONResponse(_shown(model, info))


async def delete(request: Request) -> Response:
    """Close it; its request is cancelled. Its file, if there is one, goes with `?saved=true` instead."""
    name = checked_name(request.path_params["name"])
    async with request.state.host.use(request.query_params.get("model")) as model:
        if request.query_params.get("saved") == "true":
            path = path_of(_directory(request, model.name), name)
            try:
                await request.state.session_workers.call(path.unlink)
            except FileNotFoundError:
                raise HttpProblem(404, "saved_state_missing", f"nothing is saved as {name!r}") from None
        else:
            model.runtime.close_session(request.state.partition, name)
    return JSONResponse({"id": name, "object": "session.deleted", "deleted": True})


def _directory(request: Request, model: str) -> Path:
    """Where the caller's sessions of a model are saved."""
    base = request.state.options.session_directory
    if base is None:
        raise HttpProblem(400, "no_session_directory", "sessions cannot be saved: the server has no session_directory")
    found = Path(base) / (request.state.partition or "shared") / hashlib.sha256(model.encode()).hexdigest()[:16]
    if found.is_symlink() or found.parent.is_symlink():
        raise HttpProblem(500, "session_directory", "a directory of saved sessions is a link")
    return found


def saved_bytes(directory: str | os.PathLike[str]) -> int:
    """What all saved sessions take, those that are being written included."""
    total = 0
    for base, _, files in os.walk(directory):
        for file in files:
            if SUFFIX in file:
                total += os.lstat(os.path.join(base, file)).st_size
    return total


def routes() -> list[Route]:
    """All of them."""
    return [
        Route("/v1/sessions", list_sessions, methods=["GET"]),
        Route("/v1/sessions/{name}", delete, methods=["DELETE"]),
        *(
            Route(f"/v1/sessions/{{name}}/{what.__name__}", what, methods=["POST"])
            for what in (fork, rewind, save, load)
        ),
    ]
