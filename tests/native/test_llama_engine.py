"""Engine, runner and prefix cache over libllama's context: which engine is taken, and what a recurrent state allows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_rows import model_file
from tiny_models import VOCAB, write_gemma3, write_llama

from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Generation, Reason
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.engine import Engine
from ggml_engine.errors import (
    OptionError,
    PoolFullError,
    RewindError,
    SequenceLimitError,
    SessionError,
    UnsupportedArchitectureError,
    VocabularyError,
)
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.llama import LlamaExecutor
from ggml_engine.ggml.sampler_config import SamplerConfig

WAIT_S = 60.0
TOKENS: list[list[int]] = np.random.default_rng(11).integers(3, VOCAB, (6, 40)).tolist()


def greedy(n: int, **options: Any) -> GenConfig:
    return GenConfig(sampler=SamplerConfig(temperature=0.0), max_tokens=n, ignore_eos=True, **options)


def done(generation: Generation) -> Generation:
    """When it has ended well."""
    generation.result(WAIT_S)
    return generation


def load(path: Path, **options: Any) -> Engine:
    return Engine.load(path, **{"engine": "llama", "threads": 1, "device": "cpu", "ctx": 256, **options})


@pytest.fixture(params=["mamba", "lfm2"])
def recurrent(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with load(model_file(request.param)) as engine:
        yield engine
        assert engine.runner().shutdown(WAIT_S)
        assert engine.executor.free_cells == engine.executor.capacity


# ---- which engine


def test_auto_is_native_where_there_is_a_graph_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ggml_engine")
    with load(write_llama(tmp_path / "model.gguf"), engine="auto") as engine:
        assert isinstance(engine.executor, GgmlExecutor)
        assert (engine.kind, engine.reason) == ("native", "there is a graph for 'llama' models")
    with load(model_file("mamba"), engine="auto") as engine:
        assert isinstance(engine.executor, LlamaExecutor)
        assert (engine.kind, engine.reason) == ("llama", "there is no graph for 'mamba' models here")
    told = [record.getMessage() for record in caplog.records if "engine " in record.getMessage()]
    assert [line.split(": ", 1)[1] for line in told] == [
        "engine native, because there is a graph for 'llama' models",
        "engine llama, because there is no graph for 'mamba' models here",
    ]


def test_what_the_engines_cannot_do_is_refused_with_what_can(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedArchitectureError, match="engine 'llama' runs what libllama does"):
        load(model_file("mamba"), engine="native")
    with pytest.raises(OptionError, match=r"deterministic mode.*no graph for 'mamba'"):
        load(model_file("mamba"), engine="auto", deterministic=True)
    with pytest.raises(OptionError, match=r"deterministic mode.*asked for"):
        load(path, deterministic=True)
    with pytest.raises(OptionError, match="engine is auto, native or llama, asked for 'cpp'"):
        load(path, engine="cpp")
    with pytest.raises(OptionError, match="gpu_layers"):
        load(path, gpu_layers=-1)
    with pytest.raises(OptionError, match="ctx"):
        load(path, ctx=0)
    with pytest.raises(VocabularyError, match="tokenizer 'bert'"):
        load(model_file("bert"), engine="auto")


def test_the_default_context_is_the_models_within_what_is_taken_at_once(tmp_path: Path) -> None:
    with load(write_llama(tmp_path / "short.gguf", context_length=300), ctx=None) as engine:
        assert engine.executor.capacity == 300
    with load(write_llama(tmp_path / "long.gguf", context_length=100_000), ctx=None) as engine:
        assert engine.executor.capacity == 8192


@pytest.mark.parametrize("write", [write_llama, write_gemma3])
def test_both_engines_say_the_same(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    said = []
    for kind in ("native", "llama"):
        with load(path, engine=kind, attention="matmul") as engine:
            said.append(done(engine.generate(TOKENS[0], greedy(24))).tokens)
    assert said[0] == said[1]
    assert len(said[0]) == 24


# ---- a state that cannot go back


def test_a_shorter_history_is_read_again_from_its_beginning(recurrent: Engine) -> None:  # R103 R109
    session = recurrent.session()
    session.generate(TOKENS[0], greedy(4), timeout=WAIT_S)
    with pytest.raises(RewindError, match="can go back to 0, not from"):
        session.rewind_async(20).result(WAIT_S)
    assert session.tokens[:40] == TOKENS[0]
    assert session.position == 43

    other = TOKENS[0][:20] + TOKENS[1][:10]
    again = done(session.generate_from(other, greedy(5)))
    cold = done(recurrent.generate(other, greedy(5)))
    assert again.tokens == cold.tokens
    assert again.stats.reused_tokens == 0
    assert again.stats.evaluated_tokens == 30
    longer = done(session.generate_from([*session.tokens, *again.tokens[-1:], 7, 8], greedy(2)))
    assert longer.stats.reused_tokens == 34
    assert longer.stats.evaluated_tokens == 3
    assert session.rewind_async(0).result(WAIT_S) == 0


def test_a_cancelled_prompt_leaves_the_others_and_what_it_had_read(recurrent: Engine) -> None:  # R17 R107
    want = [done(recurrent.generate(tokens, greedy(12))).tokens for tokens in TOKENS[:2]]
    sessions = [recurrent.session() for _ in range(3)]
    running = [session.generate_async(tokens, greedy(12)) for session, tokens in zip(sessions, TOKENS, strict=False)]
    running[2].cancel()
    assert [done(each).tokens for each in running[:2]] == want
    assert running[2].wait(WAIT_S)
    assert running[2].reason is Reason.CANCELLED
    assert sessions[2].status == "open"
    n = sessions[2].position
    left = done(sessions[2].generate_from(TOKENS[2], greedy(3)))
    assert left.tokens == done(recurrent.generate(TOKENS[2], greedy(3))).tokens
    assert left.stats.reused_tokens == (n if n < 40 else 0)


@pytest.mark.parametrize("name", ["mamba", "lfm2"])
def test_a_victim_that_cannot_go_back_gives_its_cells_up(name: str) -> None:  # R50
    with load(model_file(name), ctx=100) as engine:
        first, second = engine.session(), engine.session()
        first.generate(TOKENS[0], greedy(2), timeout=WAIT_S)
        second.generate(TOKENS[1][:20], greedy(2), timeout=WAIT_S)
        # both grow until there is no cell: the younger one ends
        started = threading.Event()
        older = first.generate_async([5], greedy(50), on_update=lambda _: started.set())
        assert started.wait(WAIT_S)
        younger = second.generate_async([6], greedy(50))
        assert older.wait(WAIT_S)
        assert younger.wait(WAIT_S)
        assert younger.reason is Reason.FAILED
        assert isinstance(younger.error, PoolFullError)
        assert older.reason is Reason.LENGTH
        assert second.status == "evicted"
        assert second.generate_async([5], greedy(1)).wait(WAIT_S)
        with pytest.raises(SessionError, match="others needed its cells"):
            second.generate([5], greedy(1), timeout=WAIT_S)
        assert engine.executor.free_cells == 100 - first.position
        # a first generation can go back to the beginning: its session stays
        third = engine.session()
        with pytest.raises(PoolFullError):
            third.generate(TOKENS[2][:40], greedy(2), timeout=WAIT_S)
        assert (third.status, third.position) == ("open", 0)


def test_a_prompt_that_goes_on_from_a_snapshot_is_read_from_there(recurrent: Engine) -> None:  # R24 R26
    cache, runner = PrefixCache(4), recurrent.runner()
    session = recurrent.session()
    capture = cache.capture_prompt(session, TOKENS[0])
    done(session.generate_async(TOKENS[0], greedy(3), capture.wrap(None)))
    assert capture.collect(timeout=WAIT_S)
    longer = TOKENS[0] + TOKENS[1][:10]
    found = cache.lookup(runner, longer, WAIT_S)
    assert found.n_reused == 40
    assert found.session is not None
    warm = done(found.session.generate_from(longer, greedy(5)))
    assert warm.stats.evaluated_tokens == 10
    assert warm.tokens == done(recurrent.generate(longer, greedy(5))).tokens
    # one token before its end the snapshot has no state
    again = cache.lookup(runner, TOKENS[0], WAIT_S)
    assert (again.session, again.n_reused) == (None, 0)
    assert "refused" in str(again.miss)
    cache.clear()


# ---- few sequences


def test_more_sessions_than_sequences_take_turns_and_snapshots_make_room(tmp_path: Path) -> None:
    with load(model_file("mamba")) as engine:  # 8 have a state at a time
        want = [done(engine.generate(tokens[:9], greedy(6))).tokens for tokens in TOKENS]
        running = [engine.generate(TOKENS[i % 6][:9], greedy(6)) for i in range(20)]
        assert [done(each).tokens for each in running] == [want[i % 6] for i in range(20)]

        held = [engine.session() for _ in range(8)]
        for session in held[:7]:
            session.generate(TOKENS[0][:4], greedy(1), timeout=WAIT_S)
        snapshot = held[0].snapshot_async().result(WAIT_S)
        assert snapshot is not None
        assert held[1].clone_async().result(WAIT_S) is None
        held[7].generate(TOKENS[1][:4], greedy(1), timeout=WAIT_S)
        assert snapshot.status == "evicted"
        with pytest.raises(SequenceLimitError, match="1 more sequences, 0 of 8"):
            done(engine.generate(TOKENS[1][:4], greedy(1)))
        assert [session.position for session in held] == [4] * 8


def test_a_runner_over_attention_clones_and_rewinds_anywhere(tmp_path: Path) -> None:
    with load(write_gemma3(tmp_path / "model.gguf", window=5)) as engine:
        engine.runner(RunnerOptions(max_sessions=8))
        session = engine.session()
        session.generate(TOKENS[0], greedy(6), timeout=WAIT_S)
        child = session.clone_async(13).result(WAIT_S)
        assert child is not None
        want = done(engine.generate(TOKENS[0][:13] + TOKENS[1][:5], greedy(8))).tokens
        assert child.generate(TOKENS[1][:5], greedy(8), timeout=WAIT_S).tokens == want
        assert session.rewind_async(13).result(WAIT_S) == 13
        assert session.generate(TOKENS[1][:5], greedy(8), timeout=WAIT_S).tokens == want
        assert engine.runner().stats()["failed"] == 0
