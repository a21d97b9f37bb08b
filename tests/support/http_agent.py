"""Who asks a server as a coding agent does, and compares what was evaluated with what is new."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from agent_conversation import Size
from live_server import LiveServer, live_server

WAIT_S = 300


@dataclass
class Spied:
    """A server over SmolLM2, and the replies of its runtime."""

    server: LiveServer
    http: httpx.Client
    replies: list[Any] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    n_cancelled: int = 0

    @property
    def runtime(self) -> Any:
        return self.server.host.loaded()[0].runtime

    @property
    def vocabulary(self) -> Any:
        return self.server.host.loaded()[0].engine.vocabulary

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.vocabulary.encode(text, add_special=False, parse_special=True).tolist()
        return tokens

    def spelled(self, tokens: list[int]) -> list[bytes | int]:
        """The text of tokens, cut at special ones, which stand for themselves."""
        found: list[bytes | int] = [b""]
        for token in tokens:
            piece = self.vocabulary.piece(token)
            if piece and isinstance(found[-1], bytes):
                found[-1] += piece
            else:
                found += [piece] if piece else [token, b""]
        return found

    def wait_at_rest(self) -> None:
        """Until every request has ended, and what it captured is kept."""
        deadline = time.monotonic() + WAIT_S
        while any(self.runtime.stats()[name] for name in ("waiting", "running", "lanes_in_use")):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def post(self, path: str, body: dict[str, Any], name: str | None) -> dict[str, Any]:
        """The whole answer; its counts are those of the runtime."""
        response = self.http.post(path, json=body, headers={} if name is None else {"X-Session-ID": name})
        assert response.status_code == 200, response.text
        self.wait_at_rest()
        found: dict[str, Any] = response.json()
        stats, usage = self.replies[-1].stats, found["usage"]
        assert usage["prompt_tokens"] == stats.prompt_tokens == len(self.prompts[-1])
        assert usage["prompt_tokens_details"]["cached_tokens"] == stats.prompt_tokens - stats.evaluated_tokens
        return found

    def post_and_leave(self, path: str, body: dict[str, Any], name: str | None) -> None:
        """Drop the connection when the answer has begun."""
        headers = {} if name is None else {"X-Session-ID": name}
        with self.http.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and any(_text(each) for each in json.loads(line[6:])["choices"]):
                    break
        self.wait_at_rest()
        assert self.runtime.stats()["cancelled"] == 1 + self.n_cancelled
        self.n_cancelled += 1


def _text(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


@contextmanager
def spied_server(**options: Any) -> Iterator[Spied]:
    """A server over SmolLM2 whose runtime's replies are kept."""
    options = {"ctx": 8192, "models": ["smol=smollm2"], **options}
    with live_server(**options) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
        spied = Spied(server, http)
        submit = spied.runtime.submit

        def submit_and_keep(request: Any, listener: Any) -> Any:
            reply = submit(request, listener)
            spied.replies.append(reply)
            spied.prompts.append(list(request.tokens))
            return reply

        spied.runtime.submit = submit_and_keep
        yield spied


@dataclass
class TokenAgent:
    """Sends whole histories as token ids to /v1/completions, as the session `name` or without one."""

    spied: Spied
    size: Size
    name: str | None
    evaluated: list[int] = field(default_factory=list)

    def ask(self, prompt: list[int]) -> list[int]:
        self.spied.post("/v1/completions", self._body(prompt, self.size.n_reply), self.name)
        return self._noted(prompt)

    def ask_and_cancel(self, prompt: list[int]) -> None:
        self.spied.post_and_leave("/v1/completions", self._body(prompt, 400), self.name)
        self._noted(prompt)

    def _body(self, prompt: list[int], n: int) -> dict[str, Any]:
        chosen = {"temperature": 0.8, "seed": len(self.evaluated), "ignore_eos": True}
        return {"prompt": prompt, "max_tokens": n, **chosen}

    def _noted(self, prompt: list[int]) -> list[int]:
        reply = self.spied.replies[-1]
        assert self.spied.prompts[-1] == prompt
        self.evaluated.append(reply.stats.evaluated_tokens)
        tokens: list[int] = reply.choices[0].tokens
        return tokens
