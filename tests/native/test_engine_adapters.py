"""An engine with LoRA adapters: for all sessions or for one, beside each other, in a prefix cache, and freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapters import adapter_forge, tokens_of, write_adapter
from tiny_models import write_gemma3, write_llama

from ggml_engine import (
    ClosedError,
    Engine,
    GenConfig,
    GGUFError,
    HyperparameterError,
    OptionError,
    PrefixCache,
    SamplerConfig,
    SavedStateError,
    Session,
    loading,
)
from ggml_engine.models.adapter import Adapter, load_adapter

GREEDY = GenConfig(max_tokens=10, ignore_eos=True, sampler=SamplerConfig(temperature=0.0))
PROMPT = tokens_of(2, 70)
WAIT_S = 60.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model.gguf")


@pytest.fixture
def files(tmp_path: Path, model: Path) -> list[Path]:
    return [write_adapter(tmp_path / f"{seed}.gguf", model, seed=seed) for seed in (1, 2)]


def load(model: Path, **options: object) -> Engine:
    return Engine.load(model, ctx=1024, threads=1, deterministic=True, **options)  # type: ignore[arg-type]


def said(session: Session, prompt: list[int] = PROMPT) -> list[int]:
    return session.generate(prompt, GREEDY, timeout=WAIT_S).tokens


def test_sessions_of_different_adapters_in_one_runner_say_what_each_says_alone(model: Path, files: list[Path]) -> None:
    wanted = [(), ((0, 1.0),), ((0, 0.5),), ((1, 1.0),), ((0, 1.0), (1, 1.0))]
    alone = []
    for pairs in wanted:
        with load(model, adapters=[(files[i], scale) for i, scale in pairs]) as engine:
            alone.append(engine.generate(PROMPT, GREEDY).wait(WAIT_S) and said(engine.session()))
    assert len({tuple(tokens) for tokens in alone}) == len(wanted), "an adapter does not show in the text"
    with load(model) as engine:
        adapters = [engine.load_adapter(file) for file in files]
        sessions = [engine.session(adapters=[(adapters[i], scale) for i, scale in pairs]) for pairs in wanted]
        running = [session.generate_async(PROMPT, GREEDY) for session in sessions]
        for generation, tokens in zip(running, alone, strict=True):
            assert generation.wait(WAIT_S)
            assert generation.tokens == tokens
        clone = sessions[3].clone_async(len(PROMPT) - 1).result(WAIT_S)
        assert clone is not None
        assert said(clone, PROMPT[-1:]) == alone[3]


def test_adapters_of_load_are_those_of_every_session_that_asks_for_no_others(model: Path, files: list[Path]) -> None:
    with load(model) as plain, load(model, adapters=[(files[0], 1.0)]) as engine:
        expected = said(engine.session())
        generation = engine.generate(PROMPT, GREEDY)
        assert generation.wait(WAIT_S)
        assert generation.tokens == said(engine.runner().open_session()) == expected
        assert said(engine.session(adapters=())) == said(plain.session()) != expected
        zero = [(adapter, 0.0) for adapter, _ in engine.session().adapters]
        assert said(engine.session(adapters=zero)) == said(plain.session())


def test_a_prefix_computed_with_other_adapters_is_not_reused(model: Path, files: list[Path]) -> None:
    with load(model, adapters=[(files[0], 1.0)]) as engine:
        other = engine.load_adapter(files[1])
        cache = PrefixCache(8)
        runner = engine.runner()
        ((first, _),) = engine.session().adapters
        sets = [None, (), [(first, 0.5)], [(other, 1.0)]]
        cold = [said(engine.session(adapters=pairs)) for pairs in sets]
        for pairs, expected in zip(sets, cold, strict=True):
            assert cache.lookup(runner, PROMPT, WAIT_S, adapters=pairs).session is None
            session = engine.session(adapters=pairs)
            capture = cache.capture_prompt(session, PROMPT)
            generation = session.generate_from(PROMPT, GREEDY, on_update=capture.wrap())
            assert generation.wait(WAIT_S)
            assert generation.tokens == expected
            assert capture.collect(timeout=WAIT_S)
        for pairs, expected in zip(sets, cold, strict=True):
            found = cache.lookup(runner, PROMPT, WAIT_S, adapters=pairs)
            assert found.n_reused == len(PROMPT) - 1
            assert found.session is not None
            assert said(found.session, PROMPT[found.n_reused :]) == expected
        cache.clear()


def test_closing_the_engine_frees_its_adapters(model: Path, files: list[Path]) -> None:
    engine = load(model, adapters=[(files[0], 1.0)])
    ((own, _),) = engine.session().adapters
    mine = engine.load_adapter(files[1])
    said(engine.session(adapters=[(mine, 1.0)]))
    engine.close()
    assert own.is_closed  # type: ignore[attr-defined]
    assert mine.is_closed
    with pytest.raises(ClosedError):
        engine.load_adapter(files[1])


def test_an_adapter_can_be_dropped_when_its_sessions_are_closed(model: Path, files: list[Path]) -> None:
    with load(model) as engine:
        adapter = engine.load_adapter(files[0])
        session = engine.session(adapters=[(adapter, 1.0)])
        said(session)
        with pytest.raises(OptionError, match="1 open sequences use"):
            engine.drop_adapter(adapter)
        session.close()
        engine.session().close()  # comes after the close
        engine.drop_adapter(adapter)
        assert adapter.is_closed
        with pytest.raises(OptionError, match="any more"):
            engine.session(adapters=[(adapter, 1.0)])
        said(engine.session())


def test_a_load_with_an_adapter_that_does_not_fit_leaves_nothing_behind(
    model: Path, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Adapter] = []

    def recorded(*arguments: Any) -> Adapter:
        taken.append(load_adapter(*arguments))
        return taken[-1]

    monkeypatch.setattr(loading, "load_adapter", recorded)
    other = write_adapter(tmp_path / "other.gguf", write_gemma3(tmp_path / "gemma3.gguf"))
    for bad, error in (
        ((other, 1.0), HyperparameterError),
        ((tmp_path / "none.gguf", 1.0), GGUFError),
        ((files[1], float("nan")), OptionError),
    ):
        with pytest.raises(error):
            load(model, adapters=[(files[0], 1.0), bad])
    strong = adapter_forge(model, alpha=3e38, rank=1).write(tmp_path / "strong.gguf")
    with pytest.raises(OptionError, match="too much"):
        load(model, adapters=[(strong, 9.0)])
    assert len(taken) == 3
    assert all(adapter.is_closed for adapter in taken)
    with load(model) as engine, pytest.raises(HyperparameterError):
        engine.load_adapter(other)


def test_what_was_computed_with_adapters_is_not_saved(model: Path, files: list[Path], tmp_path: Path) -> None:
    with load(model, adapters=[(files[0], 1.0)]) as engine:
        session, plain = engine.session(), engine.session(adapters=())
        cache = PrefixCache(4)
        for each in (session, plain):
            said(each)
            snapshot = each.snapshot_async(len(PROMPT)).result(WAIT_S)
            assert snapshot is not None
            assert cache.insert(snapshot, PROMPT, timeout=WAIT_S)
        with pytest.raises(SavedStateError, match="adapters"):
            session.save(tmp_path / "saved", "talk", WAIT_S)
        plain.save(tmp_path / "saved", "talk", WAIT_S)
        assert engine.runner().load_session(tmp_path / "saved", "talk", WAIT_S).adapters == ()
        assert cache.save(tmp_path / "saved", timeout=WAIT_S, runner=engine.runner()) == 1
        cache.clear()


def test_libllamas_engine_takes_no_adapters(model: Path, files: list[Path]) -> None:
    with pytest.raises(OptionError, match="native engine"):
        Engine.load(model, engine="llama", ctx=256, adapters=[(files[0], 1.0)])
    with Engine.load(model, engine="llama", ctx=256) as engine, load(model) as native:
        with pytest.raises(OptionError, match="native engine"):
            engine.load_adapter(files[0])
        with pytest.raises(OptionError, match="native engine"):
            engine.session(adapters=[(native.load_adapter(files[0]), 1.0)])
