"""/v1/sessions over a runtime that only records: names, partitions, directories and the quota; and bodies at random."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from server_fakes import WAIT_S, FakeLoader, app_of, client_of, run

from ggml_engine.errors import InputError, SessionBusyError, UnknownSessionError


class FakeRuntime:
    """Sessions at position 10; what is saved is a file of as many bytes."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def stats(self) -> dict[str, int]:
        return {"waiting": 2, "running": 3, "lanes": 4, "lanes_in_use": 1, "cache_entries": 5, "sessions": 1}

    def info(self, name: str, position: int = 10) -> Any:
        return SimpleNamespace(name=name, position=position, is_busy=False, last_used_s=0.0)

    def sessions(self, partition: str) -> list[Any]:
        return [self.info("Mine")] if not partition else []

    def fork(self, partition: str, source: str, name: str, at: int | None, timeout: float) -> Any:
        self.calls.append(("fork", partition, source, name, at))
        if source == "busy":
            raise SessionBusyError("it is in use")
        if source == "nobody":
            raise UnknownSessionError("who")
        return self.info(name, at or 10)

    def rewind(self, partition: str, name: str, to: int, timeout: float) -> Any:
        self.calls.append(("rewind", partition, name, to))
        return self.info(name, to)

    def save(self, partition: str, name: str, directory: Path, file: str, timeout: float) -> None:
        self.calls.append(("save", partition, name, file))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{file}.ggkv").write_bytes(b"x" * 1000)

    def load(self, partition: str, name: str, directory: Path, file: str, timeout: float) -> Any:
        self.calls.append(("load", partition, name, file))
        return self.info(name)

    def close_session(self, partition: str, name: str) -> None:
        self.calls.append(("close", partition, name))


def refuse(*_arguments: Any, **_options: Any) -> Any:
    """A vocabulary that takes nothing."""
    raise InputError("no tokens of this model")


def asked(*requests: tuple[str, str, Any], **given: Any) -> tuple[list[Any], FakeRuntime]:
    """The responses, and what the runtime was asked."""
    loader = FakeLoader()
    loader.runtime = runtime = FakeRuntime()
    loader.engine.executor.bytes_per_cell = 100

    async def ask() -> list[Any]:
        async with client_of(app_of(loader=loader, **given)) as client:
            responses = []
            for method, path, body in requests:
                options = {} if body is None else {"json": body}
                responses.append(await client.request(method, path, **options))
            return responses

    return run(ask()), runtime


def test_sessions_are_listed_forked_rewound_and_closed() -> None:
    (listed, forked, rewound, closed), runtime = asked(
        ("GET", "/v1/sessions", None),
        ("POST", "/v1/sessions/Mine/fork", {"name": "b.2", "at": 4}),
        ("POST", "/v1/sessions/Mine/rewind", {"to": 3}),
        ("DELETE", "/v1/sessions/Mine", None),
    )
    shown = {"id": "Mine", "object": "session", "model": "m", "position": 10, "busy": False}
    assert listed.json() == {"object": "list", "data": [shown], "saved": []}
    assert forked.json() == {**shown, "id": "b.2", "position": 4}
    assert rewound.json() == {**shown, "position": 3}
    assert closed.json()["deleted"] is True
    assert runtime.calls == [("fork", "", "Mine", "b.2", 4), ("rewind", "", "Mine", 3), ("close", "", "Mine")]


@pytest.mark.parametrize(("source", "status"), [("busy", 409), ("nobody", 404)])
def test_what_the_runtime_refuses_has_its_status(source: str, status: int) -> None:
    (response,), _ = asked(("POST", f"/v1/sessions/{source}/fork", {"name": "b"}))
    assert response.status_code == status


@pytest.mark.parametrize("name", [".hidden", "..", "a%2fb", "a b", "x" * 129, "a:b", "%00", "%C3%A9", "a\\b", "a%0Ab"])
def test_a_name_that_is_none_reaches_nothing(name: str, tmp_path: Path) -> None:
    responses, runtime = asked(
        ("POST", f"/v1/sessions/{name}/save", {}),
        ("POST", f"/v1/sessions/{name}/fork", {"name": "b"}),
        ("DELETE", f"/v1/sessions/{name}?saved=true", None),
        session_directory=str(tmp_path),
    )
    assert {response.status_code for response in responses} <= {400, 404, 405}
    assert not runtime.calls


@pytest.mark.parametrize("file", ["../up", "/etc/passwd", "con", "A", ".x", "a/b", "x" * 65, "", "a\x01"])
def test_a_file_that_is_none_is_a_400(file: str, tmp_path: Path) -> None:
    (saved, loaded), runtime = asked(
        ("POST", "/v1/sessions/Mine/save", {"file": file}),
        ("POST", "/v1/sessions/Mine/load", {"file": file}),
        session_directory=str(tmp_path),
    )
    assert (saved.status_code, loaded.status_code) == (400, 400)
    assert not runtime.calls
    assert str(tmp_path) not in saved.text


def test_saved_sessions_stay_within_the_quota_and_can_be_replaced_and_removed(tmp_path: Path) -> None:
    room_for_one = 1000 + (1 << 16) + 500  # a session of 10 cells of 100 bytes, with the room that a file needs
    requests = [
        ("POST", "/v1/sessions/Mine/save", {"file": "one"}),
        ("POST", "/v1/sessions/Mine/save", {"file": "two"}),
        ("POST", "/v1/sessions/Mine/save", {"file": "one"}),
        ("GET", "/v1/sessions", None),
        ("DELETE", "/v1/sessions/one?saved=true", None),
        ("DELETE", "/v1/sessions/one?saved=true", None),
        ("POST", "/v1/sessions/Mine/save", {"file": "two"}),
    ]
    responses, _ = asked(*requests, session_directory=str(tmp_path), session_quota=room_for_one)
    assert [response.status_code for response in responses] == [200, 507, 200, 200, 200, 404, 200]
    assert responses[3].json()["saved"] == ["one"]


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    base = tmp_path / "base"
    base.mkdir()
    (base / "shared").symlink_to(outside)
    (response,), runtime = asked(("POST", "/v1/sessions/Mine/save", {"file": "one"}), session_directory=str(base))
    assert response.status_code == 500
    assert not runtime.calls
    assert not list(outside.iterdir())


def test_metrics_tell_what_the_runtime_has() -> None:
    (response,), _ = asked(("GET", "/metrics", None))
    for line in ('queued_requests{model="m"} 2.0', 'active_requests{model="m"} 3.0', 'snapshots{model="m"} 5.0',
                 'capture_lanes_used{model="m"} 1.0', 'cells_used{model="m"} 3.0'):  # fmt: skip
        assert f"ggml_engine_{line}" in response.text


def test_requests_count_by_the_route_that_took_them() -> None:  # with every release of Starlette that may be there
    *_, response = asked(
        ("GET", "/health", None),
        ("POST", "/v1/sessions/Mine/rewind", {"to": 3}),
        ("GET", "/v1/models/a/b", None),
        ("PUT", "/tokenize", {}),
        ("GET", "/nothing", None),
        ("GET", "/metrics", None),
    )[0]
    for method, route, status in (
        ("GET", "/health", 200),
        ("POST", "/v1/sessions/{name}/rewind", 200),
        ("GET", "/v1/models/{name:path}", 404),
        ("PUT", "/tokenize", 405),
        ("GET", "other", 404),
    ):
        line = f'requests_total{{method="{method}",route="{route}",status="{status}"}} 1.0'
        assert f"ggml_engine_{line}" in response.text


def test_sessions_and_the_loading_of_models_do_not_wait_for_each_other(tmp_path: Path) -> None:
    loader = FakeLoader()
    loader.runtime = runtime = FakeRuntime()
    loader.engine.executor.bytes_per_cell = 100
    loader.engine.vocabulary = SimpleNamespace(
        special_tokens={}, check_tokens=np.array, decode=lambda _tokens, **_options: ""
    )
    gate = threading.Event()
    n_models = 8
    held: list[str] = []

    def fork(partition: str, source: str, name: str, at: int | None, timeout: float) -> Any:
        if source == "held":
            held.append(name)
            assert gate.wait(WAIT_S)
        return runtime.info(name)

    runtime.fork = fork  # type: ignore[method-assign]
    models = ["m=path", *(f"m{i}=path" for i in range(n_models))]

    async def ask() -> None:
        async with client_of(app_of(loader=loader, models=models, session_directory=str(tmp_path))) as client:

            async def post(path: str, **body: Any) -> Any:
                response = await client.post(f"/v1/sessions/{path}", json=body)
                assert response.status_code == 200, response.text
                return response

            async def until(condition: Any) -> None:
                while not condition():
                    await asyncio.sleep(0.001)

            loader.gate.clear()
            loads = [asyncio.create_task(post("x/fork", name="y", model=f"m{i}")) for i in range(n_models - 1)]
            await until(lambda: len(loader.events) == n_models)
            await post("Mine/save", file="one")
            loader.gate.set()
            await asyncio.gather(*loads)

            n_threads = len(models) + 8
            forks = [asyncio.create_task(post("held/fork", name=f"f{i}")) for i in range(n_threads)]
            await until(lambda: held)
            other = await client.post("/detokenize", json={"tokens": [], "model": f"m{n_models - 1}"})
            assert other.status_code == 200, "a model is loaded beside them"
            gate.set()
            await asyncio.gather(*forks)
            assert len(held) == n_threads

    run(ask())


def test_a_save_whose_caller_left_keeps_its_model_and_counts_for_the_next_one(tmp_path: Path) -> None:
    loader = FakeLoader()
    loader.runtime = runtime = FakeRuntime()
    loader.engine.executor.bytes_per_cell = 100
    begun, gate = threading.Event(), threading.Event()
    save = runtime.save

    def slowly(partition: str, name: str, directory: Path, file: str, timeout: float) -> None:
        begun.set()
        assert gate.wait(WAIT_S)
        save(partition, name, directory, file, timeout)

    runtime.save = slowly  # type: ignore[method-assign]
    room_for_one = 1000 + (1 << 16) + 500

    async def ask() -> list[int]:
        app = app_of(loader=loader, session_directory=str(tmp_path), session_quota=room_for_one)
        async with client_of(app) as client:
            first = asyncio.create_task(client.post("/v1/sessions/Mine/save", json={"file": "one"}))
            while not begun.is_set():
                await asyncio.sleep(0.001)
            (slot,) = app.state.host._slots.values()
            first.cancel()
            await asyncio.sleep(0.02)
            assert slot.n_users == 1, "the thread still writes what the model has"
            second = asyncio.create_task(client.post("/v1/sessions/Mine/save", json={"file": "two"}))
            await asyncio.sleep(0.02)
            assert not second.done()
            gate.set()
            response = await second
            while slot.n_users:
                await asyncio.sleep(0.001)
            return [response.status_code]

    assert run(ask()) == [507], "what the first one wrote counts"


def test_two_thousand_bodies_at_random_give_no_5xx() -> None:
    chosen = random.Random(5)
    seeds = [b'{"content": "a", "model": "m"}', b'{"model": "m", "input": ["a", [1, 2]]}', b'{"tokens": [1, 2, 3]}',
             b'{"to": 3, "name": "x", "at": null}']  # fmt: skip
    pieces = [b"[", b"{", b'"', b"\\ud800", b"\xff", b"NaN", b"1e999", b"null", b",", b":", b"\x00", b"-", b"9" * 50]
    paths = ["/tokenize", "/detokenize", "/v1/embeddings", "/v1/sessions/a/fork", "/v1/sessions/a/rewind"]
    loader = FakeLoader()
    loader.runtime = FakeRuntime()
    loader.engine.vocabulary = SimpleNamespace(encode=refuse, check_tokens=refuse)
    statuses: dict[int, int] = {}

    async def ask() -> None:
        async with client_of(app_of(loader=loader)) as client:
            for _ in range(2000):
                body = bytearray(chosen.choice(seeds))
                for _ in range(chosen.randrange(1, 5)):
                    place = chosen.randrange(len(body) + 1)
                    body[place : place + chosen.randrange(3)] = chosen.choice(pieces)
                response = await client.post(
                    chosen.choice(paths), content=bytes(body), headers={"Content-Type": "application/json"}
                )
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1

    run(ask())
    assert max(statuses) < 500, statuses
    assert statuses[400] > 1500, statuses
