"""What is said over HTTP: OpenAI's and Anthropic's requests, and their answers."""

from __future__ import annotations

from starlette.routing import Route


def routes() -> list[Route]:
    """The endpoints of all dialects."""
    return []
