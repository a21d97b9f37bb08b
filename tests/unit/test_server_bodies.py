"""What the bodies of all requests hold together: a bound, a share for each key, and nothing after a request's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from server_fakes import Jobs, app_of, client_of, post, run, running, wait_for
from starlette.applications import Starlette

from ggml_engine.errors import OptionError
from ggml_engine.server.options import ServerOptions

JSON = {"Content-Type": "application/json"}


def body(n_bytes: int) -> bytes:
    """JSON of so many bytes."""
    return b'{"a":"' + b"x" * (n_bytes - 8) + b'"}'


def bounded(jobs: Jobs, **given: Any) -> Starlette:
    """An application that takes bodies of 1000 bytes, and 2000 of them together."""
    return app_of(jobs, max_body_bytes=1000, max_bodies_bytes=2000, **given)


async def held(client: Any, jobs: Jobs, n_bytes: int, key: str = "") -> asyncio.Task[Any]:
    """A request that holds a body until its signal is set."""
    n = len(jobs.signals)
    task = asyncio.create_task(client.post("/hold", content=body(n_bytes), headers={**JSON, "x-api-key": key}))
    while len(jobs.signals) == n:
        assert not task.done(), task.result().text
        await asyncio.sleep(0.001)
    return task


def refused(response: Any) -> bool:
    """Whether there was no room, as clients are told to come again."""
    if response.status_code == 200:
        return False
    assert (response.status_code, response.json()["error"]["code"]) == (503, "bodies_full")
    assert response.headers["retry-after"] == "1"
    return True


def test_bodies_together_have_a_bound_until_their_requests_end() -> None:
    jobs = Jobs()

    async def ask() -> None:
        app = bounded(jobs)
        async with client_of(app) as client:
            tasks = [await held(client, jobs, 900), await held(client, jobs, 1000)]
            assert app.state.bodies.n_bytes == 1900
            assert refused(await client.post("/echo", content=body(101), headers=JSON))
            assert not refused(await client.post("/echo", content=body(100), headers=JSON))
            assert (await client.get("/health")).status_code == 200
            jobs.signals[0].set()
            await tasks[0]
            assert not refused(await client.post("/echo", content=body(1000), headers=JSON))
            jobs.signals[1].set()
            await tasks[1]
            assert app.state.bodies.n_bytes == 0

    run(ask())


def test_what_was_refused_has_the_shape_of_its_dialect() -> None:
    jobs = Jobs()

    async def ask() -> None:
        async with client_of(bounded(jobs)) as client:
            tasks = [await held(client, jobs, 1000) for _ in range(2)]
            response = await client.post("/v1/messages/fail", json={})
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "overloaded_error"
            for signal in jobs.signals:
                signal.set()
            await asyncio.gather(*tasks)

    run(ask())


def test_a_body_in_pieces_counts_as_it_comes() -> None:
    jobs = Jobs()

    async def ask() -> None:
        app = bounded(jobs)
        seen: list[int] = []

        async def pieces() -> AsyncIterator[bytes]:
            for part in (body(800)[:400], body(800)[400:]):
                seen.append(app.state.bodies.n_bytes)
                yield part

        async with client_of(app) as client:
            task = await held(client, jobs, 1000)
            assert not refused(await client.post("/echo", content=pieces(), headers=JSON))
            more = await held(client, jobs, 500)
            assert refused(await client.post("/echo", content=pieces(), headers=JSON))
            assert seen == [1000, 1400, 1500, 1900]
            assert app.state.bodies.n_bytes == 1500, "what came of the one that was refused is held"
            for signal in jobs.signals:
                signal.set()
            await asyncio.gather(task, more)

    run(ask())


def test_each_key_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_ENGINE_API_KEY", "a b")
    jobs = Jobs()

    async def ask() -> None:
        async with client_of(bounded(jobs)) as client:
            tasks = [await held(client, jobs, 1000, "a") for _ in range(2)]
            assert refused(await client.post("/echo", content=body(10), headers={**JSON, "x-api-key": "a"}))
            tasks.append(await held(client, jobs, 1000, "b"))
            assert refused(await client.post("/echo", content=body(10), headers={**JSON, "x-api-key": "b"}))
            for signal in jobs.signals:
                signal.set()
            await asyncio.gather(*tasks)

    run(ask())


@pytest.mark.parametrize(
    ("path", "data", "status"),
    [("/echo", body(300), 200), ("/fail", body(300), 500), ("/nowhere", body(300), 404), ("/health", body(300), 405),
     ("/echo", b"[" * 300, 400), ("/echo", body(1001), 413)],
)  # fmt: skip
def test_nothing_is_held_after_an_answer(path: str, data: bytes, status: int) -> None:
    async def ask() -> None:
        app = bounded(Jobs())
        async with client_of(app) as client:
            assert (await client.post(path, content=data, headers=JSON)).status_code == status
            assert app.state.bodies.n_bytes == 0

    run(ask())


def test_nothing_is_held_after_a_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs()
    with running(jobs, monkeypatch=monkeypatch, max_body_bytes=1000, max_bodies_bytes=2000) as server:
        bodies = server.server.config.loaded_app.state.bodies
        reading, computing = server.connect(), server.connect()
        reading.sendall(post("/echo", body(500), length=900))
        computing.sendall(post("/hold", body(700)))
        wait_for(lambda: bodies.n_bytes == 1200, "both are held")
        wait_for(lambda: jobs.signals, "one computes")
        reading.close()
        computing.close()
        wait_for(lambda: bodies.n_bytes == 0, "they are let go")
        assert jobs.cancels == ["hold"]


def test_nothing_is_held_after_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Jobs(), monkeypatch=monkeypatch, max_body_bytes=1000, body_timeout_s=0.1) as server:
        bodies = server.server.config.loaded_app.state.bodies
        assert b" 408 " in server.ask(post("/echo", body(500), length=900)).split(b"\r\n")[0]
        wait_for(lambda: bodies.n_bytes == 0, "it is let go")


def test_one_body_fits_among_all() -> None:
    assert ServerOptions().bodies_bytes == 64 << 20
    assert ServerOptions(max_body_bytes="1M").bodies_bytes == 8 << 20
    with pytest.raises(OptionError, match="max_bodies_bytes=99 has no room for one body of max_body_bytes=100"):
        ServerOptions(max_body_bytes=100, max_bodies_bytes=99)
