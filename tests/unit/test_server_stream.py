"""`EventStream`: bounded, never waiting for its reader, and never cut off in silence. Without a socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from server_fakes import FakeLoader, Jobs, app_of, client_of, run
from starlette.requests import Request

from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.lifecycle import Lifecycle
from ggml_engine.server.sse import MAX_PARTS, EventStream


class Reader:
    """Stands for a connection: takes what is sent when its gate is open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.messages: list[Any] = []
        self.aborts = 0

    async def send(self, message: Any) -> None:
        await self.open.wait()
        self.messages.append(message)

    def abort(self) -> None:
        self.aborts += 1

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    @property
    def is_whole(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("more_body") is False


def stream_of(
    on_cancel: Callable[[], object], path: str = "/v1/chat/completions", write_timeout_s: float = 5.0, **options: Any
) -> tuple[EventStream, Any, Lifecycle]:
    lifecycle = Lifecycle()
    state = {"lifecycle": lifecycle, "options": SimpleNamespace(write_timeout_s=write_timeout_s)}
    scope = {"type": "http", "path": path, "headers": [(b"host", b"x")], "query_string": b"", "state": state,
             "server": ("x", 80), "scheme": "http", "root_path": "", "method": "POST"}  # fmt: skip
    return EventStream(Request(scope), on_cancel, **options), scope, lifecycle


async def never() -> Any:
    await asyncio.Event().wait()


def test_events_are_sent_in_order_and_the_last_one_says_that_it_is_the_last() -> None:
    cancels: list[str] = []

    async def go() -> None:
        reader = Reader()
        stream, scope, _ = stream_of(lambda: cancels.append("x"))
        sending = asyncio.create_task(stream(scope, never, reader.send))
        assert stream.put({"text": "ä\n"})
        assert stream.put("plain", "named")
        assert stream.comment("prefill 1/2")
        stream.finish()
        assert not stream.put({"late": 1})
        await sending
        assert reader.text == (
            'data: {"text":"ä\\n"}\n\nevent: named\ndata: plain\n\n: prefill 1/2\n\ndata: [DONE]\n\n'
        )
        assert reader.is_whole

    run(go())
    assert not cancels


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("/v1/chat/completions", {}, 'data: {"error": {"message": "why"'),
        ("/v1/messages", {"done": None}, 'event: error\ndata: {"type": "error", "error": {"type": "api_error"'),
    ],
)
def test_a_failure_after_the_headers_is_an_event(path: str, options: Any, expected: str) -> None:
    async def go() -> None:
        reader = Reader()
        stream, scope, _ = stream_of(lambda: None, path, **options)
        sending = asyncio.create_task(stream(scope, never, reader.send))
        stream.put({"text": "a"})
        stream.fail(HttpProblem(500, "engine_error", "why"))
        stream.finish()
        await sending
        _, second, *rest = reader.text.split("\n\n")
        assert second.startswith(expected)
        assert rest == ([""] if options else ["data: [DONE]", ""])
        assert reader.is_whole

    run(go())


def test_a_reader_that_lags_is_given_up_and_its_generation_cancelled() -> None:
    cancels: list[str] = []

    async def go() -> None:
        reader = Reader()
        reader.open.clear()
        stream, scope, _ = stream_of(lambda: cancels.append("x"))
        sending = asyncio.create_task(stream(scope, never, reader.send))
        await asyncio.sleep(0)
        taken = [stream.put({"n": n}) for n in range(MAX_PARTS + 50)]
        assert taken == [True] * MAX_PARTS + [False] * 50
        assert cancels == ["x"]
        reader.open.set()
        await sending
        *events, error, done, end = reader.text.split("\n\n")
        assert [json.loads(event.removeprefix("data: "))["n"] for event in events] == list(range(MAX_PARTS))
        assert '"slow_reader"' in error
        assert (done, end) == ("data: [DONE]", "")

    run(go())
    assert cancels == ["x"]


def test_comments_leave_room_for_events() -> None:
    async def go() -> None:
        stream, _, _ = stream_of(lambda: None)
        for _ in range(10 * MAX_PARTS):
            assert stream.comment("progress")
        assert all(stream.put({"n": n}) for n in range(MAX_PARTS // 2))

    run(go())


def test_a_write_that_takes_too_long_ends_the_connection_and_the_generation() -> None:
    cancels: list[str] = []

    async def go() -> None:
        reader = Reader()
        reader.open.clear()
        stream, scope, _ = stream_of(lambda: cancels.append("x"), write_timeout_s=0.05)
        scope["state"]["abort_connection"] = reader.abort
        stream.put({"n": 1})
        await stream(scope, never, reader.send)
        assert reader.aborts == 1
        assert not stream.put({"n": 2})

    run(go())
    assert cancels == ["x"]


def test_a_client_that_leaves_cancels_the_generation_once() -> None:
    cancels: list[str] = []

    async def go() -> None:
        reader = Reader()
        stream, scope, _ = stream_of(lambda: cancels.append("x"))
        sending = asyncio.create_task(stream(scope, never, reader.send))
        stream.put({"n": 1})
        await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert not stream.put({"n": 2})
        stream.fail(HttpProblem(500, "x", "x"))

    run(go())
    assert cancels == ["x"]


def test_a_client_that_leaves_as_a_write_ends_cancels_the_generation() -> None:
    cancels: list[str] = []

    async def go() -> None:
        stream, scope, _ = stream_of(lambda: cancels.append("x"))

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                asyncio.get_running_loop().call_soon(sending.cancel)

        sending = asyncio.create_task(stream(scope, never, send))
        stream.put({"n": 1})
        await asyncio.wait({sending}, timeout=1)
        was_over = sending.done()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert was_over

    run(go())
    assert cancels == ["x"]


def test_a_server_that_closes_ends_its_streams_with_an_error() -> None:
    cancels: list[str] = []

    async def go() -> None:
        reader = Reader()
        stream, scope, lifecycle = stream_of(lambda: cancels.append("x"))
        sending = asyncio.create_task(stream(scope, never, reader.send))
        await asyncio.sleep(0)
        stream.put({"n": 1})
        lifecycle.end_streams()
        await sending
        assert '"shutting_down"' in reader.text
        assert reader.text.endswith("data: [DONE]\n\n")
        assert reader.is_whole

    run(go())
    assert cancels == ["x"]


def test_threads_that_fill_a_stream_lose_nothing() -> None:
    async def go() -> None:
        reader = Reader()
        stream, scope, _ = stream_of(lambda: None)
        room = threading.Semaphore(MAX_PARTS // 2)

        async def send(message: Any) -> None:
            reader.messages.append(message)
            for _ in range(message.get("body", b"").count(b"data: ")):
                room.release()

        sending = asyncio.create_task(stream(scope, never, send))

        def fill() -> None:
            for n in range(3000):
                assert room.acquire(timeout=10)
                assert stream.put({"n": n})
            stream.finish()

        await asyncio.to_thread(fill)
        await sending
        events = reader.text.split("\n\n")[:-2]
        assert [json.loads(event.removeprefix("data: "))["n"] for event in events] == list(range(3000))

    run(go())


def test_a_stream_that_is_left_in_a_closed_loop_refuses_events() -> None:
    kept: list[EventStream] = []

    async def go() -> None:
        kept.append(stream_of(lambda: None)[0])

    run(go())
    kept[0].put({"n": 1})
    assert not kept[0].put({"n": 2})


@pytest.mark.parametrize("path", ["/hold", "/stream"])
def test_a_client_that_leaves_cancels_what_it_asked_for(path: str) -> None:
    jobs = Jobs()

    async def go() -> None:
        async with client_of(app_of(jobs)) as client:
            asking = asyncio.create_task(client.post(path, json={}))
            while not (jobs.signals or jobs.streams):
                await asyncio.sleep(0.001)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert jobs.cancels == [path[1:]]

    run(go())


def test_a_client_that_leaves_while_the_model_is_loaded_ends_the_loading() -> None:
    loader = FakeLoader()

    async def go() -> None:
        app = app_of(Jobs(), loader, models=["m=path", "n=other"])
        async with client_of(app) as client:
            loader.gate.clear()
            asking = asyncio.create_task(client.post("/tokenize", json={"content": "x", "model": "n"}))
            while not app.state.host.is_loading("n") or loader.count("load", "n") < 1:
                await asyncio.sleep(0.001)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            while not loader.count("cancelled", "n"):
                await asyncio.sleep(0.001)
            loader.gate.set()

    run(go())
