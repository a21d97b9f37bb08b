"""Models of a server: loaded once, within a budget, unloaded when nobody uses them, and never before."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack

import pytest
from server_fakes import FakeLoader, app_of, client_of, run

from ggml_engine.errors import EngineError, GGUFError, OptionError
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.hosting import ModelHost

MODELS = (("a", "pa"), ("b", "pb"), ("c", "pc"))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def host_of(loader: FakeLoader, budget: int | None = None, idle_s: float | None = None) -> tuple[ModelHost, Clock]:
    clock = Clock()
    return ModelHost(MODELS, loader, budget=budget, idle_s=idle_s, clock=clock), clock


async def used(host: ModelHost, name: str | None = None) -> str:
    async with host.use(name) as model:
        return model.name


def test_a_model_is_loaded_once_however_many_ask_for_it() -> None:
    async def go() -> None:
        loader = FakeLoader()
        loader.gate.clear()
        host, _ = host_of(loader)
        asking = [asyncio.create_task(used(host, "b")) for _ in range(20)]
        await asyncio.sleep(0.02)
        assert host.is_loading("b")
        assert host.loaded() == []
        loader.gate.set()
        assert await asyncio.gather(*asking) == ["b"] * 20
        assert loader.events == [("load", "b")]
        await host.close()

    run(go())


def test_a_request_without_a_name_gets_the_first_model_and_an_unknown_name_a_404() -> None:
    async def go() -> None:
        host, _ = host_of(FakeLoader())
        assert await used(host) == "a"
        with pytest.raises(HttpProblem) as caught:
            await used(host, "nobody")
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        await host.close()

    run(go())


def test_a_load_that_nobody_waits_for_is_cancelled_and_one_that_somebody_does_is_not() -> None:
    async def go() -> None:
        loader = FakeLoader()
        loader.gate.clear()
        host, _ = host_of(loader)
        asking = [asyncio.create_task(used(host, "b")) for _ in range(2)]
        await asyncio.sleep(0.02)
        asking[0].cancel()
        await asyncio.sleep(0.05)
        assert not loader.count("cancelled")
        asking[1].cancel()
        while not loader.count("cancelled"):
            await asyncio.sleep(0.001)
        again = asyncio.create_task(used(host, "b"))  # it begins anew
        while loader.count("load") < 2:
            await asyncio.sleep(0.001)
        loader.gate.set()
        assert await again == "b"
        await host.close()

    run(go())


def test_a_load_that_fails_is_told_without_paths_and_can_be_tried_again() -> None:
    async def go() -> None:
        loader = FakeLoader()
        loader.faults["pb"] = GGUFError("truncated", "/secret/pb", 3, "header", "cut")
        host, _ = host_of(loader, budget=100)
        with pytest.raises(HttpProblem) as caught:
            await used(host, "b")
        assert (caught.value.status, caught.value.code) == (500, "model_load_failed")
        assert "secret" not in caught.value.message
        del loader.faults["pb"]
        assert await used(host, "b") == "b"
        await host.close()

    run(go())


def test_the_least_recently_used_idle_model_makes_room() -> None:
    async def go() -> None:
        loader = FakeLoader({"pa": 40, "pb": 40, "pc": 40})
        host, _ = host_of(loader, budget=100)
        for name in ("a", "b", "a", "c"):
            await used(host, name)
        assert [model.name for model in host.loaded()] == ["a", "c"]
        assert loader.events == [("load", "a"), ("load", "b"), ("close", "b"), ("load", "c")]
        await host.close()

    run(go())


def test_a_model_in_use_is_not_unloaded_for_another() -> None:
    async def go() -> None:
        loader = FakeLoader({"pa": 60, "pb": 60})
        host, clock = host_of(loader, budget=100, idle_s=10)
        async with host.use("a"):
            clock.now += 1000
            await host.unload_idle()
            with pytest.raises(HttpProblem) as caught:
                await used(host, "b")
            assert (caught.value.status, caught.value.code) == (503, "model_busy")
            assert "Retry-After" in caught.value.headers
            assert not loader.count("close")
        assert await used(host, "b") == "b"
        assert loader.events == [("load", "a"), ("close", "a"), ("load", "b")]
        await host.close()

    run(go())


def test_a_model_that_never_fits_is_refused_with_its_sizes() -> None:
    async def go() -> None:
        loader = FakeLoader({"pb": 3 << 30})
        host, _ = host_of(loader, budget=1 << 30)
        with pytest.raises(OptionError, match=r"memory_budget.*1\.00 GiB.*'b'.*3\.00 GiB"):
            host.check_sizes()
        with pytest.raises(HttpProblem, match=r"3\.00 GiB.*1\.00 GiB") as caught:
            await used(host, "b")
        assert (caught.value.status, caught.value.code) == (400, "model_too_large")
        assert not loader.events
        await host.close()

    run(go())


def test_an_idle_model_is_unloaded_after_its_time_and_loaded_again_when_it_is_asked_for() -> None:
    async def go() -> None:
        loader = FakeLoader()
        host, clock = host_of(loader, idle_s=10)
        await used(host, "a")
        clock.now += 9
        await host.unload_idle()
        assert not loader.count("close")
        clock.now += 2
        await host.unload_idle()
        assert loader.count("close", "a") == 1
        assert host.loaded() == []
        assert await used(host, "a") == "a"
        assert loader.count("load", "a") == 2
        await host.close()

    run(go())


def test_the_memory_of_a_model_counts_until_it_is_closed() -> None:
    async def go() -> None:
        loader = FakeLoader({"pa": 60, "pb": 60})
        host, _ = host_of(loader, budget=100)
        await used(host, "a")
        loader.close_gate.clear()
        asking = asyncio.create_task(used(host, "b"))
        await asyncio.sleep(0.05)
        assert loader.events == [("load", "a")]
        loader.close_gate.set()
        assert await asking == "b"
        assert loader.events == [("load", "a"), ("close", "a"), ("load", "b")]
        await host.close()

    run(go())


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_could_not_be_closed_keeps_its_memory_and_is_closed_again(fails: bool) -> None:
    async def go() -> None:
        loader = FakeLoader({"pa": 60, "pb": 60})
        host, _ = host_of(loader, budget=100)
        await used(host, "a")
        (model,) = host.loaded()
        is_at_work = True

        def close(_timeout: float) -> bool:
            if is_at_work and fails:
                raise EngineError("nothing was freed")
            return not is_at_work

        model.close = close
        for _ in range(2):
            with pytest.raises(HttpProblem) as caught:
                await used(host, "b")
            assert (caught.value.status, caught.value.code) == (503, "model_busy")
        assert loader.count("load", "b") == 0
        is_at_work = False
        assert await used(host, "b") == "b"
        assert await host.close()

    run(go())


def test_what_an_unloaded_model_took_is_given_back_before_the_next_one_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def go() -> None:
        loader = FakeLoader({"pa": 60, "pb": 60})
        host, _ = host_of(loader, budget=100)
        events: list[object] = []

        def give_back() -> None:
            gc.collect()
            events.append((first() is None, loader.count("load")))

        monkeypatch.setattr("ggml_engine.server.hosting.give_back", give_back)
        await used(host, "a")
        (model,) = host.loaded()
        first = weakref.ref(model)
        del model
        await used(host, "b")
        assert events == [(True, 1)]
        await host.close()

    run(go())


def test_many_callers_of_many_models_stay_within_the_budget() -> None:
    async def go() -> None:
        loader = FakeLoader({"pa": 50, "pb": 50, "pc": 50})
        host, _ = host_of(loader, budget=100)
        served = 0
        refusals: set[str] = set()

        async def caller(number: int) -> None:
            nonlocal served
            for turn in range(10):
                try:
                    async with host.use("abc"[(number + turn) % 3]):
                        assert len(host.loaded()) <= 2
                        await asyncio.sleep(0.001)
                        served += 1
                except HttpProblem as problem:
                    refusals.add(problem.code)
                    await asyncio.sleep(0.002)

        await asyncio.gather(*(caller(number) for number in range(8)))
        assert served > 20
        assert refusals <= {"model_busy"}
        await host.close()
        assert loader.count("load") == loader.count("close")

    run(go())


def test_closing_ends_loads_and_refuses_further_ones() -> None:
    async def go() -> None:
        loader = FakeLoader()
        host, _ = host_of(loader)
        await used(host, "a")
        loader.gate.clear()
        asking = asyncio.create_task(used(host, "b"))
        while loader.count("load") < 2:
            await asyncio.sleep(0.001)
        assert await host.close()
        with pytest.raises(HttpProblem) as caught:
            await asking
        assert caught.value.status == 503
        assert loader.count("close", "a") == 1
        with pytest.raises(HttpProblem):
            await used(host, "a")

    run(go())


def test_health_says_that_the_first_model_is_loaded_and_waits_for_nothing() -> None:
    async def go() -> None:
        loader = FakeLoader()
        loader.gate.clear()
        async with client_of(app_of(loader=loader), started=False) as client:
            response = await client.get("/health")
            assert (response.status_code, response.json()) == (503, {"status": "loading model"})
            models = (await client.get("/v1/models")).json()["data"]
            assert [model["status"] for model in models] == ["loading"]
            loader.gate.set()
            async with AsyncExitStack():
                while (response := await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.001)
            assert response.json() == {"status": "ok"}

    run(go())


def test_a_first_load_that_fails_for_an_unknown_reason_is_tried_again_by_the_next_request() -> None:
    async def go() -> None:
        loader = FakeLoader()
        loader.faults["path"] = KeyError("/secret/path")
        failed: list[BaseException] = []
        app = app_of(loader=loader, on_failed_start=failed.append)
        async with client_of(app, started=False) as client:
            while (found := await client.get("/health")).json() == {"status": "loading model"}:
                await asyncio.sleep(0.001)
            why = "the model 'm' could not be loaded (KeyError); the server's log says why"
            assert (found.status_code, found.json()) == (503, {"status": "error", "error": why})
            found = await client.post("/tokenize", json={"content": "x"})
            assert (found.status_code, found.json()["error"]["message"]) == (500, why)
            assert loader.count("load") == 2
            assert not failed
            del loader.faults["path"]
            assert await used(app.state.host) == "m"
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert loader.count("load") == 3

    run(go())


def test_a_first_load_that_cannot_succeed_is_told_to_who_started_the_server() -> None:
    async def go() -> None:
        loader = FakeLoader()
        loader.faults["path"] = fault = GGUFError("truncated", "/secret/m", 3, "header", "cut")
        failed: list[BaseException] = []
        async with client_of(app_of(loader=loader, on_failed_start=failed.append), started=False) as client:
            while not failed:
                await asyncio.sleep(0.001)
            assert failed == [fault]
            assert "secret" not in (await client.get("/health")).text

    run(go())


def test_with_any_model_every_name_is_one() -> None:
    async def go() -> None:
        host = ModelHost(MODELS, FakeLoader(), any_model=True)
        assert [await used(host, name) for name in (None, "gpt-4o", "b", "a")] == ["a", "a", "b", "a"]
        await host.close()
        other = ModelHost([(f"m{i}", "p") for i in range(20)], FakeLoader())
        with pytest.raises(HttpProblem, match=r"'gpt-4o', only m0, .*m7, \.\.\.; .*any_model") as caught:
            await used(other, "gpt-4o")
        assert caught.value.status == 404
        await other.close()

    run(go())
