"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ggml_engine.server.bodies import read_json
from ggml_engine.server.dialects.completions_rendering import CompletionStream, render_completion
from ggml_engine.server.dialects.completions_request import CompletionRequest
from ggml_engine.server.dialects.rendering import Head
from ggml_engine.server.dialects.respond import respond
from ggml_engine.server.dialects.sampling import session_of
from ggml_engine.server.hosting import use_model
from ggml_engine.server.sse import DONE
from ggml_engine.server.validation import validated


async def completions(request: Request) -> Response:
    """What goes on after prompts, in OpenAI's form."""
    body = validated(CompletionRequest, await read_json(request))
    job = body.job(session_of(body.session_id, request.headers))
    model = await use_model(request, job.model)
    head = Head.new("cmpl-", model)
    whole = partial(render_completion, head, job)
    return await respond(request, model, job, whole, CompletionStream(head, job), done=DONE)
