"""Prepared inputs through the graph: embeddings stand where tokens would, and what does not fit changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_rows import model_file
from cell_walk import state_of
from embeddings import batch_with_prepared, embeddings_of, prepared
from engines import Logits, batch_of, executor_over, feed, loaded, running
from libllama import Oracle, Type
from tiny_models import F16, F32, Q8_0, VOCAB, write_gemma3, write_llama

from ggml_engine.errors import InputError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.inputs import GraphKey
from ggml_engine.executor.prepared import OPAQUE, EmbeddingInput, Kind, PreparedInput, PreparedSlice
from ggml_engine.models.model import Model

TOKENS: list[list[int]] = np.random.default_rng(8).integers(3, VOCAB, (4, 60)).tolist()
# the square root of 96 is no f32, so that gemma's scale rounds
WRITERS: dict[str, Callable[..., Path]] = {
    "llama": lambda path, **options: write_llama(path, n_embd=96, head_size=32, **options),
    "gemma3": lambda path, **options: write_gemma3(path, n_embd=96, window=7, **options),
}
CASES = [("llama", F32), ("llama", Q8_0), ("gemma3", F32), ("gemma3", F16), ("gemma3", Q8_0)]
MODES: dict[str, dict[str, Any]] = {
    "matmul, columns": {"attention": "matmul", "v_layout": "columns"},
    "flash, rows": {"attention": "flash", "v_layout": "rows"},
    "cells": {"attention": "cells"},
    "deterministic": {"deterministic": True},
}


@pytest.fixture(scope="module", params=CASES, ids=[f"{kind} {types.name}" for kind, types in CASES])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Model]:
    kind, types = request.param
    with loaded(WRITERS[kind](tmp_path_factory.mktemp("tiny") / "model.gguf", types=types), threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_gemma3(tmp_path_factory.mktemp("tiny") / "model.gguf", window=5, n_layer=3, pattern=2)
    with loaded(path, threads=1) as model:
        yield model


# ---- the same bytes


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("chunk", [60, 23, 1])
def test_a_models_own_embeddings_give_the_bytes_of_its_tokens(
    model: Model, mode: dict[str, Any], chunk: int
) -> None:  # R45
    """Prefill in slices of one prepared input, then decode from tokens: logits, K and V."""
    source = prepared(model, TOKENS[0])
    found: list[tuple[bytes, ...]] = []
    for from_rows in (False, True):
        with executor_over(model, capacity=128, **mode) as executor:
            sequence = executor.open()
            logits: list[Logits] = []
            for start in range(0, 60, chunk):
                stop = min(60, start + chunk)
                part: Any = (source, start, stop) if from_rows else TOKENS[0][start:stop]
                logits.append(executor.forward(batch_with_prepared([(sequence, part)])))
            logits.append(feed(executor, sequence, TOKENS[1][:5], 1))
            pool = executor.cache.pool
            cells = [piece.tobytes() for il in range(model.hp.n_layer) for c in range(65) for piece in pool.cell(il, c)]
            found.append((np.concatenate(logits).tobytes(), *cells))
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["matmul, columns", "flash, rows"])
def test_embeddings_give_the_bytes_of_libllama(model: Model, mode: str) -> None:
    """Numbers that belong to no token, as one whole prefill, then tokens."""
    rows = np.random.default_rng(4).standard_normal((30, 96)).astype(np.float32) * 2
    source = EmbeddingInput(rows)
    path = Path(model.file.path)
    oracle = Oracle(path, flash=mode.startswith("flash"), type_k=Type.F16, type_v=Type.F16, use_extra_bufts=True)
    with oracle, running(path, **MODES[mode], capacity=512) as executor:
        sequence = executor.open()
        ours = [executor.forward(batch_with_prepared([(sequence, (source, 0, 30))]))]
        ours.append(feed(executor, sequence, TOKENS[0][:3], 1))
        ours.append(executor.forward(batch_with_prepared([(sequence, (source, 5, 9))])))
        theirs = [oracle.forward_embeddings(rows)]
        theirs += [oracle.forward([token], 30 + i) for i, token in enumerate(TOKENS[0][:3])]
        theirs.append(oracle.forward_embeddings(rows[5:9], 33))
        assert np.concatenate(ours).tobytes() == np.concatenate(theirs).tobytes()
        assert ours[0].std() > 0.5, "flat logits would hide mistakes"


SCALED = ("gemma", "gemma2", "muse-glimmer", "gemma4")


@pytest.mark.parametrize("name", SCALED)
def test_embeddings_that_are_scaled_or_normed_stand_where_those_of_tokens_do(name: str) -> None:
    with running(model_file(name), capacity=256) as executor:
        a, b = executor.open(), executor.open()
        source = prepared(executor.model, TOKENS[0][:20])
        from_rows = executor.forward(batch_with_prepared([(a, (source, 0, 20))]))
        assert from_rows.tobytes() == feed(executor, b, TOKENS[0][:20]).tobytes()
        assert executor.forward(batch_of([(a, [7])])).tobytes() == executor.forward(batch_of([(b, [7])])).tobytes()


@pytest.mark.parametrize("mode", ["matmul, columns", "flash, rows"])
@pytest.mark.parametrize("name", ["gemma4 per layer inputs, shared layers", "gemma4 fused everywhere, q8_0"])
def test_what_layers_add_for_a_token_is_that_of_token_0_where_an_embedding_stands(name: str, mode: str) -> None:
    """As libllama has it, also where tokens of other sequences are in the step."""
    rows = np.random.default_rng(4).standard_normal((30, 64)).astype(np.float32) * 2
    source = EmbeddingInput(rows)
    path = model_file(name)
    oracle = Oracle(path, flash=mode.startswith("flash"), type_k=Type.F16, type_v=Type.F16, use_extra_bufts=True)
    with oracle, running(path, **MODES[mode], capacity=512) as executor:
        sequence = executor.open()
        ours = [executor.forward(batch_with_prepared([(sequence, (source, 0, 30))]))]
        ours.append(feed(executor, sequence, TOKENS[0][:3], 1))
        theirs = [oracle.forward_embeddings(rows)]
        theirs += [oracle.forward([token], 30 + i) for i, token in enumerate(TOKENS[0][:3])]
        assert np.concatenate(ours).tobytes() == np.concatenate(theirs).tobytes()
        one, other = executor.open(), executor.open()
        mixed = executor.forward(batch_with_prepared([(one, TOKENS[1][:9]), (other, (source, 0, 30))]))
        assert np.abs(mixed[9:] - theirs[0]).max() < 0.1  # of logits that spread by 2: other cells, other roundings
        assert np.array_equal(mixed[:9].argmax(axis=1), feed(executor, executor.open(), TOKENS[1][:9]).argmax(axis=1))


def test_decodes_and_embeddings_go_in_one_step(model: Model) -> None:
    """Rows of tokens stay those of tokens: the step's logits are the bytes of the same step from tokens alone."""
    first, second = prepared(model, TOKENS[1]), prepared(model, TOKENS[2])
    parts: list[list[Any]] = [
        [TOKENS[0][20:21], TOKENS[1][:17], TOKENS[2][:9], TOKENS[3][20:24]],
        [TOKENS[0][20:21], (first, 0, 17), (second, 0, 9), TOKENS[3][20:24]],  # prepared rows in the middle
        [TOKENS[0][20:21], (first, 0, 17), TOKENS[2][:9], TOKENS[3][20:24]],
    ]
    found = []
    for step in parts:
        with executor_over(model, capacity=256) as executor:
            sequences = [executor.open() for _ in range(4)]
            for i in (0, 3):
                feed(executor, sequences[i], TOKENS[i][:20])
            logits = executor.forward(batch_with_prepared(list(zip(sequences, step, strict=True))))
            found.append(logits.tobytes() + feed(executor, sequences[1], TOKENS[1][17:19]).tobytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("n", [1, 3, 8, 11])
def test_a_padded_step_repeats_a_prepared_last_row_as_such(gemma: Model, n: int) -> None:
    """Deterministic steps have whole tiles of rows; padding writes the last row's cell once more, so it must be that row."""
    found = []
    for part in (TOKENS[1][:n], (prepared(gemma, TOKENS[1]), 0, n)):
        with executor_over(gemma, capacity=256, deterministic=True) as executor:
            a, b = executor.open(), executor.open()
            feed(executor, a, TOKENS[0][:5])
            logits = executor.forward(batch_with_prepared([(a, TOKENS[0][5:7]), (b, part)]))
            found.append(logits.tobytes() + feed(executor, b, TOKENS[1][n : n + 4], 1).tobytes())
    assert found[0] == found[1]


def test_embeddings_in_any_rows_of_an_interleaved_batch(gemma: Model) -> None:
    order = np.random.default_rng(2).permutation(20)
    order[np.isin(order, range(10))] = np.arange(10)  # each sequence in its own order
    order[~np.isin(order, range(10))] = np.arange(10, 20)
    a_rows, b_rows = prepared(gemma, TOKENS[0]), prepared(gemma, TOKENS[1])
    found = []
    for sources in ((), (a_rows, b_rows)):
        with executor_over(gemma, capacity=256) as executor:
            sequences = [executor.open(), executor.open()]
            plain = batch_of([(sequences[0], TOKENS[0][:10]), (sequences[1], TOKENS[1][:10])], order.tolist())
            slices = tuple(
                PreparedSlice(sources[i // 10], i % 10, i % 10 + 1, row)
                for row, i in enumerate(order.tolist())
                if sources and i % 3
            )
            tokens = np.where(np.isin(np.arange(20), [piece.row for piece in slices]), OPAQUE, plain.tokens)
            batch = Batch(tokens.astype(np.int32), plain.sequences, plain.wants_logits, None, slices)
            assert batch.n_prepared == len(slices)
            found.append(executor.forward(batch).tobytes())
    assert found[0] == found[1]


def test_a_step_without_prepared_rows_has_the_graph_that_it_had(gemma: Model) -> None:
    with executor_over(gemma, capacity=64) as executor:
        a = executor.open()
        executor.forward(Batch.of_sequence(a, TOKENS[0][:8], logits="all"))
        plain = next(iter(executor.graphs._ready.values()))
        assert plain.inputs.prepared is None
        n_plain = plain.graph.n_nodes
        executor.rewind(a, 0)
        executor.forward(batch_with_prepared([(a, (prepared(gemma, TOKENS[0]), 0, 8))]))
        executor.rewind(a, 0)
        keys: list[GraphKey] = list(executor.graphs._ready)
        assert [key.n_prepared for key in keys] == [0, 8]
        assert executor.graphs._ready[keys[1]].graph.n_nodes == n_plain + 1  # set_rows
        executor.forward(Batch.of_sequence(a, TOKENS[0][:8], logits="all"))
        assert executor.graphs.n_built == 2


# ---- what is accepted


class Other(PreparedInput):
    """Another kind."""

    kind = Kind("pictures")

    def size(self) -> int:
        return 4

    def content_hash(self) -> bytes:
        return b""


class Disguised(Other):
    """Says that it is embeddings, and has no rows."""

    kind = EmbeddingInput.kind


class Shrinking(EmbeddingInput):
    """As large as it says at first."""

    def size(self) -> int:
        return self.__dict__.get("shown", super().size())


def test_embeddings_are_accepted_by_kind_width_and_fingerprint(gemma: Model) -> None:  # R44 R48
    rows = np.ones((4, 64))
    with executor_over(gemma, capacity=16) as executor:
        assert executor.accepts(EmbeddingInput(rows))
        assert executor.accepts(EmbeddingInput(rows, gemma.fingerprint))
        refused: list[PreparedInput] = [
            EmbeddingInput(rows, "another model"),
            EmbeddingInput(rows, gemma.fingerprint[:-1]),
            EmbeddingInput(np.ones((4, 63))),
            EmbeddingInput(np.ones((64, 4))),
            Other(),
            Disguised(),
        ]
        for source in refused:
            assert not executor.accepts(source)


def test_what_is_not_accepted_is_refused_with_nothing_changed(gemma: Model) -> None:  # R44 R48
    with executor_over(gemma, capacity=16) as executor:
        a, b = executor.open(), executor.open()
        feed(executor, a, TOKENS[0][:3])
        before = state_of(executor.cache), executor.graphs.n_built, executor.cache.pool.rows  # type: ignore[arg-type]
        for source in (Other(), Disguised(), EmbeddingInput(np.ones((4, 63))), EmbeddingInput(np.ones((4, 64)), "no")):
            slices = (PreparedSlice(source, 0, 4, 1),)
            batch = Batch(np.zeros(5, np.int32), np.array([a, b, b, b, b]), np.ones(5, np.bool_), None, slices)
            with pytest.raises(InputError, match=f"{source.kind.name}.* 64 numbers"):
                executor.forward(batch)
            now = state_of(executor.cache), executor.graphs.n_built, executor.cache.pool.rows  # type: ignore[arg-type]
            assert now == before
        changing = Shrinking(np.ones((4, 64)))
        batch = Batch(
            np.zeros(4, np.int32), np.full(4, b), np.ones(4, np.bool_), None, (PreparedSlice(changing, 0, 4, 0),)
        )
        changing.__dict__["shown"] = 3  # R47: not the size that it had when the batch was made
        with pytest.raises(InputError):
            executor.forward(batch)
        assert executor.free_cells == executor.capacity - 3
        feed(executor, a, TOKENS[0][3:6])


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([(0, 0, 0)], "positions 0 to 0 .* has 4"),
        ([(2, 1, 0)], "positions 2 to 1"),
        ([(-1, 2, 0)], "positions -1 to 2"),
        ([(0, 5, 0)], "positions 0 to 5"),
        ([(0, 4, 3)], "rows 3 to 7 of a batch of 6"),
        ([(0, 1, 6)], "rows 6 to 7"),
        ([(0, 2, -1)], "rows -1 to 1"),
        ([(0, 3, 0), (0, 3, 2)], "rows 2 to 5, some of which"),
        ([(0, 3, 2), (3, 4, 2)], "some of which"),
        ([(0, 1.5, 0)], "integer bounds"),
        ([(False, 1, 0)], "integer bounds"),
    ],
)
def test_slices_that_cannot_be_in_a_batch_make_none(pieces: list[tuple[Any, Any, Any]], told: str) -> None:
    source = EmbeddingInput(np.ones((4, 8)))
    slices = tuple(PreparedSlice(source, *piece) for piece in pieces)
    with pytest.raises(InputError, match=told):
        Batch(np.zeros(6, np.int32), np.zeros(6, np.int64), np.ones(6, np.bool_), None, slices)


def test_the_tokens_in_prepared_rows_are_ignored_and_others_are_not() -> None:
    slices = (PreparedSlice(EmbeddingInput(np.ones((4, 8))), 1, 3, 2),)
    tokens = np.array([5, 6, OPAQUE, 2**40, 9])
    batch = Batch(tokens, np.zeros(5, np.int64), np.ones(5, np.bool_), None, slices)  # type: ignore[arg-type]
    assert batch.tokens.tolist() == [5, 6, 0, 0, 9]
    assert (batch.n_tokens, batch.n_prepared) == (5, 2)
    assert tokens.tolist() == [5, 6, OPAQUE, 2**40, 9]
    with pytest.raises(InputError, match="32 bits"):
        Batch(np.array([2**40, 1, 2, 3, 4]), batch.sequences, batch.wants_logits, None, slices)  # type: ignore[arg-type]


# ---- fingerprints


def test_a_fingerprint_is_that_of_the_model_and_not_of_where_it_lies(tmp_path: Path) -> None:
    found = []
    for name in ("a.gguf", "b.gguf"):
        with loaded(write_llama(tmp_path / name), threads=1) as model:
            found.append(model.fingerprint)
    with loaded(tmp_path / "a.gguf", threads=2, mmap=False, repack=False) as model:
        found.append(model.fingerprint)
    assert set(found) == {found[0]}
    assert len(found[0]) == 64
    assert int(found[0], 16)


VARIANTS: dict[str, dict[str, Any]] = {
    "weights": {"seed": 1},
    "types": {"types": F16},
    "a tensor more": {"tied": True},
    "a shape": {"n_ff": 128},
    "layers": {"n_layer": 3},
    "a hyperparameter": {"eps": 2e-5},
    "rotation": {"rope_base": 10001.0},
    "heads": {"n_head": 2, "n_head_kv": 1, "head_size": 32},
}


@pytest.mark.parametrize("changed", VARIANTS.values(), ids=VARIANTS)
def test_another_model_has_another_fingerprint(tmp_path: Path, changed: dict[str, Any]) -> None:  # R48
    found = set()
    for i, options in enumerate(({}, changed)):
        with loaded(write_llama(tmp_path / f"{i}.gguf", **options), threads=1) as model:
            found.add(model.fingerprint)
    assert len(found) == 2


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.0.ffn_norm.weight", "output.weight"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_changed_end_of_any_tensor_changes_the_fingerprint(tmp_path: Path, name: str, place: str) -> None:
    path = write_llama(tmp_path / "model.gguf")
    with loaded(path, threads=1) as model:
        before, info = model.fingerprint, model.file.tensors[name]
        at = info.offset if place == "first" else info.offset + info.n_bytes - 1
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with loaded(path, threads=1) as model:
        assert model.fingerprint != before


@pytest.mark.parametrize("expert", range(8))
def test_a_change_at_the_end_of_any_expert_changes_the_fingerprint(tmp_path: Path, expert: int) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(model_file("qwen3moe groups"), path)
    with loaded(path, threads=1) as model:
        before, info = model.fingerprint, model.file.tensors["blk.2.ffn_down_exps.weight"]
    data = bytearray(path.read_bytes())
    data[info.offset + (expert + 1) * (info.n_bytes // 8) - 1] ^= 1
    path.write_bytes(data)
    with loaded(path, threads=1) as model:
        assert model.fingerprint != before


def test_an_embedding_of_the_oracle_must_have_its_width(gemma: Model) -> None:
    with Oracle(Path(gemma.file.path)) as oracle, pytest.raises(InputError, match=r"\[rows, 64\].*\(3, 63\)"):
        oracle.forward_embeddings(np.ones((3, 63), np.float32))
    assert embeddings_of(gemma, [5]).shape == (1, 64)
