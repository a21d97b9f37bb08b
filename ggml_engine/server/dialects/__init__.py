"""What is said over HTTP: OpenAI's and Anthropic's requests as checked models, and answers, whole and streamed."""

from __future__ import annotations

from starlette.routing import Route

from ggml_engine.server.dialects.anthropic_messages import count_tokens, messages
from ggml_engine.server.dialects.chat_completions import chat_completions
from ggml_engine.server.dialects.completions import completions
from ggml_engine.server.dialects.response_store import ResponseStore
from ggml_engine.server.dialects.responses import responses_endpoint


def routes() -> list[Route]:
    """The endpoints of all dialects, for one server: what it keeps of responses is its own."""
    responses = responses_endpoint(ResponseStore())
    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        # without /v1: as llama.cpp's clients ask
        Route("/chat/completions", chat_completions, methods=["POST"]),
        Route("/completions", completions, methods=["POST"]),
        Route("/responses", responses, methods=["POST"]),
    ]
