"""The official clients over a server that is scripted (`dialect_fakes`), and what tests send through them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
from dialect_fakes import FakeReply, FakeServer, fake_server, transport_of

BASE = "http://127.0.0.1"
SPOKEN = "[{{ message.role }}]{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}"
TEMPLATE = "{% for message in messages %}" + SPOKEN + "{% endfor %}[assistant]"
BASH: dict[str, Any] = {
    "name": "Bash",
    "description": "Run a command.",
    "input_schema": {"$schema": "x", "type": "object", "properties": {"command": {"type": "string"}}},
    "eager_input_streaming": True,
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
}


@asynccontextmanager
async def anthropic_client(template: str = TEMPLATE, **options: Any) -> AsyncIterator[tuple[FakeServer, Any]]:
    async with (
        fake_server(template, **options) as server,
        anthropic.AsyncAnthropic(
            api_key="none", base_url=BASE, http_client=transport_of(anthropic, server), max_retries=0
        ) as client,
    ):
        yield server, client


@asynccontextmanager
async def openai_client(template: str = TEMPLATE, **options: Any) -> AsyncIterator[tuple[FakeServer, Any]]:
    async with (
        fake_server(template, **options) as server,
        openai.AsyncOpenAI(
            api_key="none", base_url=f"{BASE}/v1", http_client=transport_of(openai, server), max_retries=0
        ) as client,
    ):
        yield server, client


def prompt_of(server: FakeServer) -> str:
    return server.runtime.replies[-1].prompt


def thoughtful(reply: FakeReply) -> None:
    for piece in ("<think>", "hm, yes", "</think>", "42"):
        reply.say(piece)
    reply.end()
