"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ggml_engine.server.bodies import read_json
from ggml_engine.server.dialects.anthropic_rendering import MessageStream, render_message
from ggml_engine.server.dialects.anthropic_request import CountRequest, MessagesRequest
from ggml_engine.server.dialects.rendering import Head
from ggml_engine.server.dialects.respond import respond
from ggml_engine.server.dialects.sampling import session_of
from ggml_engine.server.hosting import use_model
from ggml_engine.server.prompts import count_prompt
from ggml_engine.server.tokens import in_turn
from ggml_engine.server.validation import validated


async def messages(request: Request) -> Response:
    """An answer to messages, in Anthropic's form."""
    body = validated(MessagesRequest, await read_json(request))
    job = body.job(session_of(body.session_id, request.headers))
    model = await use_model(request, job.model)
    head, shows = Head.new("msg_", model), body.shows_thinking
    whole = partial(render_message, head, shows_thinking=shows)
    return await respond(request, model, job, whole, MessageStream(head, shows_thinking=shows))


async def count_tokens(request: Request) -> Response:
    """How many tokens a prompt has; nothing is generated."""
    job = validated(CountRequest, await read_json(request)).job()
    model = await use_model(request, job.model)
    return JSONResponse({"input_tokens": await in_turn(request, partial(count_prompt, model, job))})
