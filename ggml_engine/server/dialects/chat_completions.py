"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ggml_engine.server.bodies import read_json
from ggml_engine.server.dialects.chat_rendering import ChatStream, render_chat
from ggml_engine.server.dialects.chat_request import ChatRequest
from ggml_engine.server.dialects.rendering import Head
from ggml_engine.server.dialects.respond import respond
from ggml_engine.server.dialects.sampling import session_of
from ggml_engine.server.hosting import use_model
from ggml_engine.server.sse import DONE
from ggml_engine.server.validation import validated


async def chat_completions(request: Request) -> Response:
    """An answer to messages, in OpenAI's form."""
    body = validated(ChatRequest, await read_json(request))
    job = body.job(session_of(body.session_id, request.headers))
    model = await use_model(request, job.model)
    head = Head.new("chatcmpl-", model)
    return await respond(request, model, job, partial(render_chat, head, job), ChatStream(head, job), done=DONE)
