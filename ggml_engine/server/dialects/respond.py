"""From a job to a response: the whole answer as JSON, or a stream of its events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ggml_engine.server.dialects.rendering import StreamRenderer
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.events import Answer, Event, Failed, Finished, Progress, collect
from ggml_engine.server.generation import Run
from ggml_engine.server.hosted_model import HostedModel
from ggml_engine.server.jobs import ChatJob, CompletionJob
from ggml_engine.server.prompts import prepare
from ggml_engine.server.sse import EventStream, RenderError


async def answer(request: Request, model: HostedModel, job: ChatJob | CompletionJob) -> Answer:
    """The whole answer; a client that leaves ends it. Raises HttpProblem and what the engine raises."""
    prepared = await asyncio.to_thread(prepare, model, job, request.state.partition)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, (Finished, Failed)) and not done.done():
            done.set_result(None)

    run = Run(model, prepared, on_event, request.state.metrics)
    run.start(job, request.state.partition)
    try:
        await done
    finally:
        run.cancel()
    found = collect(events, prepared.n_choices)
    if isinstance(found, Failed):
        raise found.problem
    return found


async def respond(
    request: Request,
    model: HostedModel,
    job: ChatJob | CompletionJob,
    whole: Callable[[Answer], dict[str, Any]],
    renderer: StreamRenderer,
    *,
    done: str | None = None,
    render_error: RenderError | None = None,
) -> Response:
    """The response to a job: `whole` writes an answer, `renderer` a stream, which ends with `done`.

    What is wrong with a request is raised before a stream begins; what fails later is its last event.
    """
    check_choices(request, job)
    if not job.stream:
        return JSONResponse(whole(await answer(request, model, job)))
    prepared = await asyncio.to_thread(prepare, model, job, request.state.partition)

    def on_event(event: Event) -> None:
        if isinstance(event, Progress):
            stream.comment(f"prefill {event.done}/{event.total}")
        if isinstance(event, Failed):
            stream.fail(event.problem)
        else:
            for name, data in renderer.frames(event):
                stream.put(data, name)
            if isinstance(event, Finished):
                stream.finish()

    run = Run(model, prepared, on_event, request.state.metrics)
    stream = EventStream(request, run.cancel, done=done, render_error=render_error)
    run.start(job, request.state.partition)
    return stream


def check_choices(request: Request, job: ChatJob | CompletionJob) -> None:
    """Raise HttpProblem (400) for more choices than the server's option allows."""
    most = request.state.options.max_choices
    if job.n > most:
        raise HttpProblem(400, "invalid_value", f"n is {job.n}, at most {most} choices are possible here", "n")
