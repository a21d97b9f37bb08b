"""Two real models in a budget that holds one of them, over HTTP: each answers as it does alone, and gives its memory back."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_fakes import WAIT_S, wait_for

from ggml_engine import Engine, GenConfig, SamplerConfig
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.models.model import Model
from ggml_engine.pool.kv_pool import GgmlKvPool
from ggml_engine.server.hosting import ModelHost
from ggml_engine.server.loader import EngineLoader
from ggml_engine.server.options import resolve
from ggml_engine.server.run import Server

MODELS = {"a": "smollm2", "b": "gemma3-270m"}
PROMPT = "The capital of France is"
CTX = 512
N_TOKENS = 8


class Lifetimes:
    """Who was made and freed: engines, executors, pools of K/V and weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        begin = Engine.__init__

        def init(engine: Engine, *args: Any, **named: Any) -> None:
            begin(engine, *args, **named)
            self.engines.add(engine)

        monkeypatch.setattr(Engine, "__init__", init)
        self.made: dict[str, int] = {}
        self.freed: dict[str, int] = {}
        for kind, end in ((GgmlExecutor, "close_all"), (Model, "free"), (GgmlKvPool, "free")):
            self._watch(monkeypatch, kind, end)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, kind: Any, end: str) -> None:
        name, begin, finish = kind.__name__, kind.__init__, getattr(kind, end)
        ended: set[int] = set()

        def init(this: Any, *args: Any, **named: Any) -> None:
            self.made[name] = self.made.get(name, 0) + 1
            ended.discard(id(this))
            begin(this, *args, **named)

        def done(this: Any) -> None:
            finish(this)
            if id(this) not in ended:
                ended.add(id(this))
                self.freed[name] = self.freed.get(name, 0) + 1

        monkeypatch.setattr(kind, "__init__", init)
        monkeypatch.setattr(kind, end, done)

    def alive(self) -> dict[str, int]:
        return {name: n - self.freed.get(name, 0) for name, n in self.made.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What each model says."""
    config = GenConfig(max_tokens=N_TOKENS, sampler=SamplerConfig(temperature=0.0), ignore_eos=True)
    found = {}
    for name, path in MODELS.items():
        with Engine.load(path, ctx=CTX, threads=1) as engine:
            found[name] = engine.generate(PROMPT, config).result()
    return found


class Serving:
    """The server, and what it asks its models for."""

    def __init__(self, client: httpx.Client, host: ModelHost, lifetimes: Lifetimes) -> None:
        self.client = client
        self.host = host
        self.lifetimes = lifetimes

    def ask(self, model: str, **more: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True, **more}
        return self.client.post("/v1/completions", json={"model": model, **body})

    def text(self, model: str) -> str:
        answer = self.ask(model)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return str(answer.json()["choices"][0]["text"])

    def states(self) -> dict[str, str]:
        return {each["id"]: each["status"] for each in self.client.get("/v1/models").json()["data"]}


def sizes(**options: Any) -> list[int]:
    loader = EngineLoader(resolve({"models": list(MODELS.values()), **options}), None)
    return [loader.measure(path).total for path in MODELS.values()]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    lifetimes = Lifetimes(monkeypatch)
    options: dict[str, Any] = {"ctx": CTX, "threads": 1}
    named = [f"{name}={path}" for name, path in MODELS.items()]
    budget = max(sizes(**options)) + 1
    assert budget < sum(sizes(**options))
    server = Server(resolve({"models": named, "port": 0, "memory_budget": budget, **options}))
    thread = threading.Thread(target=server.serve_until_told)
    thread.start()
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            wait_for(lambda: server.started, "the server listens")
            wait_for(lambda: client.get("/health").status_code == 200, "the first model is loaded")
            yield Serving(client, server._host, lifetimes)
    finally:
        server.stop()
        thread.join(WAIT_S)
    assert not thread.is_alive()
    assert server.is_whole
    assert set(lifetimes.alive().values()) == {0}


def test_models_take_turns_in_a_budget_that_holds_one(serving: Serving, expected: dict[str, str]) -> None:
    assert serving.states() == {"a": "loaded", "b": "unloaded"}
    for turn in range(6):
        name, other = ("ab", "ba")[(turn + 1) % 2]
        assert serving.text(name) == expected[name]
        assert serving.states() == {name: "loaded", other: "unloaded"}
        alive = serving.lifetimes.alive()
        assert len(serving.lifetimes.engines) == 1  # others are not even garbage
        assert alive["Model"] == alive["GgmlExecutor"] == alive["GgmlKvPool"] == 1, alive
    assert serving.host.n_loads == 7
    assert serving.lifetimes.made["Model"] == 7


def test_a_model_in_use_is_not_unloaded_and_its_request_is_whole(serving: Serving, expected: dict[str, str]) -> None:
    body = {"model": "a", "prompt": PROMPT, "max_tokens": 150, "temperature": 0, "ignore_eos": True, "stream": True}
    with serving.client.stream("POST", "/v1/completions", json=body) as stream:
        events = stream.iter_lines()
        assert next(events).startswith((":", "data: "))
        refused = serving.ask("b")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "model_busy"
        assert serving.states() == {"a": "loaded", "b": "unloaded"}
        assert serving.text("a") == expected["a"]  # others of it are let in
        assert serving.lifetimes.freed.get("Model", 0) == 0
        rest = [line for line in events if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert '"length"' in rest[-2]
    assert serving.text("b") == expected["b"]
    assert serving.states() == {"a": "unloaded", "b": "loaded"}


def test_many_callers_of_both_get_their_own_models_answer_or_are_told_to_come_again(
    serving: Serving, expected: dict[str, str]
) -> None:
    begun = {
        name: text[:12] for name, text in expected.items()
    }  # beside others the last bits of logits are not the same
    assert begun["a"] != begun["b"]

    async def go() -> None:
        async with httpx.AsyncClient(base_url=serving.client.base_url, timeout=120) as client:

            async def one(name: str) -> None:
                body = {"prompt": PROMPT, "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True}
                for _ in range(2000):
                    answer = await client.post("/v1/completions", json={"model": name, **body})
                    if answer.status_code == 200:
                        said = answer.json()["choices"][0]["text"]
                        assert said.startswith(begun[name])
                        return
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_busy")
                    await asyncio.sleep(0.02)
                raise AssertionError(f"{name} never had a turn")

            await asyncio.gather(*(one("ab"[i % 2]) for i in range(8)))

    asyncio.run(go())
    assert set(serving.lifetimes.alive().values()) == {1}
