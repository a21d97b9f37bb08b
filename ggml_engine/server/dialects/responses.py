"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ggml_engine.server.bodies import read_json
from ggml_engine.server.dialects.rendering import Frame, Head
from ggml_engine.server.dialects.respond import respond
from ggml_engine.server.dialects.response_store import ResponseStore
from ggml_engine.server.dialects.responses_rendering import ResponseStream, render_response
from ggml_engine.server.dialects.responses_request import ResponseRequest
from ggml_engine.server.dialects.responses_tools import joined, spelled
from ggml_engine.server.dialects.sampling import session_of
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.events import Answer, Event, Finished
from ggml_engine.server.hosting import use_model
from ggml_engine.server.jobs import Message
from ggml_engine.server.validation import validated


def responses_endpoint(store: ResponseStore) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint, over what is kept of earlier responses."""

    async def responses(request: Request) -> Response:
        """A response, in OpenAI's newer form."""
        body = validated(ResponseRequest, await read_json(request))
        partition = request.state.partition
        earlier = _earlier(store, partition, body.previous_response_id)
        job = body.job(session_of(body.session_id, request.headers), earlier)
        model = await use_model(request, job.model)
        head = Head.new("resp_", model)
        echoed, names = body.echoed(), spelled(body.tools or [])

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                store.put(partition, head.id, (*earlier, *body.messages(), answered(response["output"])))

        def whole(answer: Answer) -> dict[str, Any]:
            response = render_response(head, echoed, answer, names=names, seals_reasoning=body.seals_reasoning)
            keep(response)
            return response

        rendered = ResponseStream(head, echoed, names=names, seals_reasoning=body.seals_reasoning)
        stream = _KeptStream(rendered, keep)
        return await respond(request, model, job, whole, stream, render_error=stream.failure)

    return responses


class _KeptStream:
    """A stream whose response is kept when it is whole."""

    def __init__(self, stream: ResponseStream, keep: Callable[[dict[str, Any]], None]) -> None:
        self._stream = stream
        self._keep = keep

    def frames(self, event: Event) -> list[Frame]:
        """The events of an event."""
        frames = self._stream.frames(event)
        if isinstance(event, Finished):
            self._keep(self._stream.response)
        return frames

    def failure(self, problem: HttpProblem) -> Frame:
        """The last event of a response that comes to no end."""
        return self._stream.failure(problem)


def _earlier(store: ResponseStore, partition: str, identifier: str | None) -> tuple[Message, ...]:
    if identifier is None:
        return ()
    found = store.find(partition, identifier)
    if found is None:
        raise HttpProblem(
            404,
            "previous_response_not_found",
            f"there is no response {identifier!r:.80}: it was not stored, or others took its place; send its input",
            "previous_response_id",
        )
    return found


def answered(output: list[dict[str, Any]]) -> Message:
    """The items of a response as the message that they are in a conversation."""
    message: Message = {"role": "assistant", "content": ""}
    for item in output:
        if item["type"] == "message":
            message["content"] += item["content"][0]["text"]
        elif item["type"] == "reasoning":
            message["reasoning_content"] = message.get("reasoning_content", "") + item["content"][0]["text"]
        elif item["status"] == "completed":
            function = {"name": joined(item.get("namespace"), item["name"]), "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return message
