"""A server whose model says what a test has it say: requests come in by HTTP, answers are scripted."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
from fake_text import FakeSampler, FakeText
from starlette.applications import Starlette

from ggml_engine.chat.template import METADATA_KEY, ChatTemplate
from ggml_engine.control.generation import GenerationStats, Prefill, Reason, Update
from ggml_engine.control.logprobs import TokenLogprobs
from ggml_engine.errors import InputError
from ggml_engine.ggml.sampler_config import SamplerConfig
from ggml_engine.ggml.token_bytes import TokenBytes
from ggml_engine.ggml.vocab import StreamDecoder
from ggml_engine.server.app import create_app
from ggml_engine.server.hosted_model import HostedModel, ModelSize
from ggml_engine.server.options import resolve
from ggml_engine.serving.request import ServingRequest

END = 256
TEMPLATE = (
    "{% for message in messages %}{% if message.content == 'refuse me' %}{{ raise_exception('no such talk') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
)


class Bytes:
    """A vocabulary of bytes, and a token that ends."""

    n_tokens = 257
    adds_space = False
    special_tokens = {"<|end|>": END}  # noqa: RUF012

    def __init__(self) -> None:
        self.read: list[str] = []  # texts that were tokenised

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> Any:
        self.read.append(text)
        return np.array(list(text.encode()), np.int32)

    def encode_segments(self, segments: Sequence[tuple[str, bool]], *, add_special: bool) -> Any:
        return self.encode("".join(text for text, _ in segments), add_special=add_special, parse_special=False)

    def check_tokens(self, tokens: Sequence[int]) -> Any:
        for token in tokens:
            if not 0 <= token < self.n_tokens:
                raise InputError(f"token id {token} is out of range: the vocabulary has 0 to 256")
        return np.array(tokens, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()

    def is_end(self, token: int) -> bool:
        return token == END

    def piece(self, token: int) -> bytes:
        return b"" if token == END else bytes([token])

    def text(self, token: int) -> str:
        return "<|end|>" if token == END else chr(token)


class ScriptedText(FakeText):
    """For a real runner: every generation says `said`, a token for each byte, and ends."""

    def __init__(self, said: str) -> None:
        super().__init__(Bytes.n_tokens, ends=(END,))
        self.said = said

    def sampler(self, config: SamplerConfig) -> FakeSampler:
        made = super().sampler(config)
        tokens = iter((*self.said.encode(), END))
        made.sample = lambda _logits: next(tokens)  # type: ignore[method-assign,misc]
        return made

    def decoder(self, shown: frozenset[int] = frozenset()) -> Any:
        return StreamDecoder(cast(Any, Bytes()), shown=shown)


@dataclass(eq=False)
class FakeChoice:
    """What a listener is given at the end."""

    index: int
    stats: GenerationStats = field(default_factory=GenerationStats)
    reason: Reason | None = None
    error: BaseException | None = None
    n_cancels: int = 0

    def cancel(self) -> None:
        self.n_cancels += 1


class FakeReply:
    """A reply whose choices say and end as they are told."""

    def __init__(self, request: ServingRequest, listener: Any, cached: int) -> None:
        self.request = request
        self.choices = [FakeChoice(index) for index in range(request.n)]
        self._listener = listener
        self._cached = cached
        self.n_cancels = 0

    @property
    def prompt(self) -> str:
        return bytes(self.request.tokens).decode()

    @property
    def stats(self) -> Any:
        generated = sum(choice.stats.generated_tokens for choice in self.choices)
        return SimpleNamespace(cached_tokens=self._cached, generated_tokens=generated)

    def cancel(self) -> None:
        self.n_cancels += 1

    def prefill(self, done: int, total: int) -> None:
        self._listener.on_update(0, Update(prefill=Prefill(done, total, 1.0)))

    def say(self, text: str, index: int = 0, *, logprobs: bool = False) -> None:
        """A token for each byte, its text at once."""
        tokens = tuple(text.encode())
        self.choices[index].stats.generated_tokens += len(tokens)
        named = tuple(TokenLogprobs(token, -0.5, ((token, -0.5), (END, -1.5))) for token in tokens) if logprobs else ()
        self._listener.on_update(index, Update(tokens=tokens, text=text, logprobs=named))

    def end(
        self,
        reason: Reason = Reason.FINISHED,
        index: int = 0,
        *,
        error: BaseException | None = None,
        stop: str | None = None,
    ) -> None:
        choice = self.choices[index]
        choice.reason, choice.error, choice.stats.stopped_by = reason, error, stop
        self._listener.on_settled(index, choice)


def hello(reply: FakeReply) -> None:
    """Every choice says hello and ends."""
    for index in range(reply.request.n):
        reply.say("hello", index, logprobs=reply.request.config.logprobs is not None)
        reply.end(index=index)


class FakeRuntime:
    """Runs `script` for every request; `replies` are those so far."""

    def __init__(self) -> None:
        self.script: Callable[[FakeReply], object] = hello
        self.cached = 0
        self.error: Exception | None = None
        self.replies: list[FakeReply] = []
        self.runner = SimpleNamespace(text=FakeText(0))
        self.session_limit = 2000

    def submit(self, request: ServingRequest, listener: Any) -> FakeReply:
        if self.error is not None and self.replies:
            raise self.error
        reply = FakeReply(request, listener, self.cached)
        self.replies.append(reply)
        self.script(reply)
        return reply

    def retained_tokens(self, partition: str, name: str) -> list[list[int]]:
        return []

    def stats(self) -> dict[str, int]:
        return {}


class FakeServer:
    """The client of a server over a scripted runtime."""

    def __init__(self, app: Starlette, client: httpx.AsyncClient, runtime: FakeRuntime, vocabulary: Bytes) -> None:
        self.app = app
        self.client = client
        self.runtime = runtime
        self.vocabulary = vocabulary

    @property
    def request(self) -> ServingRequest:
        """The last one that reached the runtime."""
        return self.runtime.replies[-1].request

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def chat(self, content: str = "hi", headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", headers, messages=messages, **body)


def stream_data(response: httpx.Response) -> list[Any]:
    """What the events of a stream hold, in their order; [DONE] as it is."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def transport_of(sdk: Any, server: FakeServer) -> Any:
    """An HTTP client for an official client, by the package that this one uses: httpx, or what followed it."""
    packages = [kind.__module__.partition(".")[0] for kind in sdk.DefaultAsyncHttpxClient.__mro__]
    http = importlib.import_module(next(name for name in packages if name.startswith("httpx")))
    return http.AsyncClient(transport=http.ASGITransport(server.app))


@asynccontextmanager
async def fake_server(
    template: str | None = TEMPLATE, *, runtime: Any = None, **options: Any
) -> AsyncIterator[FakeServer]:
    """A server in this process, without a socket; over a `FakeRuntime`, where no other runtime is given."""
    runtime = FakeRuntime() if runtime is None else runtime
    made = None if template is None else ChatTemplate(template)
    engine = SimpleNamespace(
        vocabulary=Bytes(),
        file=SimpleNamespace(metadata={} if template is None else {METADATA_KEY: template}),
        template=made,
        executor=SimpleNamespace(max_positions=2000, stats=dict),
    )

    class Loader:
        def measure(self, path: str) -> ModelSize:
            return ModelSize(1, 0)

        def load(self, name: str, path: str, cancel: Callable[[], bool]) -> HostedModel:
            facts = {"token_bytes": TokenBytes(4)}  # a quarter of what its tokens say: they are counted, too
            return HostedModel(name, engine, runtime, lambda _timeout: True, facts=facts)

    app = create_app(resolve({"models": ["m=path"], "api_key_env": None, **options}), loader=Loader())
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=10) as client:
            yield FakeServer(app, client, runtime, engine.vocabulary)
    await app.state.host.close()


def run(test: Coroutine[Any, Any, None], timeout_s: float = 30) -> None:
    """`asyncio.run` that ends."""

    async def bounded() -> None:
        await asyncio.wait_for(test, timeout_s)

    asyncio.run(bounded())
