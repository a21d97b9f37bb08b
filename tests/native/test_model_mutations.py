"""A well-formed file that is no model we can run: one typed error, names and figures in it, before memory is taken.

By the rows of the project's table of mutations (36 to 45, 56 to 62), what it leaves open included.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from engines import feed, running
from forged_models import drop_key, drop_tensors, find_tensor, set_key, taken_apart
from gguf_forge import FLOAT64, INT32, STRING, UINT64, GGUFForge
from tiny_models import write_gemma3, write_llama

from ggml_engine.errors import HyperparameterError, ModelError, UnsupportedArchitectureError, WeightError
from ggml_engine.ggml.backends import Buffer
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.models.model import load_model
from ggml_engine.pool.window import Window

Change = Callable[[GGUFForge], object]
TOKENS = [5, 9, 13, 200]
F16, I8, I32, I64, F64 = 1, 24, 26, 27, 28


class Case(NamedTuple):
    row: int
    name: str
    change: Change
    error: type[ModelError]
    parts: tuple[str, ...]  # of the message


def key(name: str, value: Any, **kinds: int) -> Change:
    return lambda forge: set_key(forge, f"{architecture(forge)}.{name}", value, **kinds)


def without(name: str) -> Change:
    return lambda forge: drop_key(forge, f"{architecture(forge)}.{name}")


def architecture(forge: GGUFForge) -> str:
    return next(str(value.value) for value in forge.values if value.key == "general.architecture")


def shaped(name: str, *shape: int) -> Change:
    return lambda forge: setattr(find_tensor(forge, name), "shape", shape)


def renamed(name: str, to: str) -> Change:
    return lambda forge: setattr(find_tensor(forge, name), "name", to)


def typed(name: str, kind: int, width: float) -> Change:
    def change(forge: GGUFForge) -> None:
        tensor = find_tensor(forge, name)
        tensor.kind, tensor.data = kind, bytes(int(math.prod(tensor.shape) * width))

    return change


def value_case(row: int, name: str, value: Any, *parts: str, **kinds: int) -> Case:
    return Case(row, f"{name} {value!r}", key(name, value, **kinds), HyperparameterError, (name, *parts))


Q, UP, NORM = "blk.1.attn_q.weight", "blk.1.ffn_up.weight", "blk.1.attn_norm.weight"
NAN, INF = float("nan"), float("inf")

BOTH = [
    *(Case(36, f"{label} product", typed(Q, kind, width), WeightError, (Q, label, "multiplied"))
      for label, kind, width in [("I8", I8, 1), ("I32", I32, 4), ("I64", I64, 8), ("F64", F64, 8)]),
    Case(36, "I32 rows", typed("token_embd.weight", I32, 4), WeightError, ("token_embd.weight", "I32", "looked up")),
    *(Case(36, f"{label} norm", typed(NORM, kind, width), WeightError, (NORM, label, "f32"))
      for label, kind, width in [("F16", F16, 2), ("I32", I32, 4), ("F64", F64, 8)]),
    Case(38, "no architecture", lambda f: drop_key(f, "general.architecture"), HyperparameterError, ("general.architecture", "none")),
    Case(38, "a number", lambda f: set_key(f, "general.architecture", 7), HyperparameterError, ("general.architecture", "7")),
    Case(38, "unknown", lambda f: set_key(f, "general.architecture", "llama9"), UnsupportedArchitectureError, ("'llama9'", "no graph here", "nothing here runs it")),
    value_case(39, "block_count", 0, "1 to 512", "0"),
    value_case(39, "block_count", 513, "1 to 512", "513"),
    value_case(39, "block_count", 2**32 - 1, "4294967295"),
    value_case(39, "block_count", -1, "-1", kind=INT32),
    value_case(39, "block_count", "two", "integer", "'two'"),
    value_case(39, "block_count", 2.0, "integer", "2.0"),
    value_case(39, "block_count", True, "integer", "True"),
    value_case(39, "block_count", 1, "is 1", "2 layers", "layer 1"),
    value_case(39, "block_count", 3, "is 3", "2 layers", "none of layer 2"),
    Case(39, "no block_count", without("block_count"), HyperparameterError, ("block_count", "does not have")),
    Case(39, "a layer in between is absent", lambda f: drop_tensors(f, "blk.0."), HyperparameterError, ("block_count", "none of layer 0")),
    value_case(40, "embedding_length", 0, "0"),
    value_case(40, "embedding_length", 32, "32", "rows of 64"),
    value_case(40, "embedding_length", 2**32 - 1, "4294967295"),
    Case(40, "no embedding_length", without("embedding_length"), HyperparameterError, ("embedding_length",)),
    value_case(41, "attention.head_count", 0, "0"),
    value_case(41, "attention.head_count", [4], "2 layers", "are 1"),
    value_case(41, "attention.head_count_kv", 0, "0"),
    value_case(41, "attention.head_count_kv", 3, "4 query heads", "3 K/V heads"),
    value_case(41, "attention.head_count_kv", [2], "2 layers", "are 1"),
    value_case(41, "attention.head_count_kv", [2, 0], "0"),
    value_case(41, "attention.head_count_kv", ["2", "2"], "strings"),
    value_case(41, "attention.head_count_kv", np.array([2, 2], np.float32), "float32"),
    Case(41, "twice the heads", key("attention.head_count", 8), WeightError, ("blk.0.attn_q.weight", "64,")),
    value_case(42, "rope.dimension_count", 0, "0"),
    value_case(42, "rope.dimension_count", 15, "even", "15"),
    value_case(42, "rope.dimension_count", 2**31, "2147483648"),
    value_case(42, "rope.dimension_count", 34, "34"),
    *(value_case(43, "rope.freq_base", base, "above 0") for base in (NAN, 0.0, -1.0, INF, -INF)),
    value_case(43, "rope.freq_base", 1e-300, "above 0", kind=FLOAT64),
    value_case(43, "rope.freq_base", 1e300, "above 0", kind=FLOAT64),
    value_case(43, "rope.freq_base", "big", "number", "'big'"),
    *(value_case(43, "rope.scaling.factor", factor, "above 0.001") for factor in (NAN, -1.0, INF, 1e-40)),
    *(value_case(43, "rope.scaling.attn_factor", factor, "above 0 and up to 1000") for factor in (NAN, 0.0, -1.0, 1001.0, INF)),
    value_case(43, "rope.scaling.type", "magic", "'magic'"),
    value_case(43, "rope.scaling.type", 5, "string", "5"),
    value_case(43, "rope.scaling.original_context_length", 0, "0"),
    Case(43, "yarn with base 1", lambda f: (key("rope.scaling.type", "yarn")(f), key("rope.freq_base", 1.0)(f)), HyperparameterError, ("YaRN", "base above 1")),
    *(value_case(44, "attention.layer_norm_rms_epsilon", eps, "above 0 and below 1") for eps in (NAN, -1e-5, 0.0, 1e30, 1.0, INF)),
    value_case(44, "attention.layer_norm_rms_epsilon", 1e-300, "above 0 and below 1", kind=FLOAT64),
    Case(44, "no epsilon", without("attention.layer_norm_rms_epsilon"), HyperparameterError, ("epsilon", "does not have")),
    value_case(45, "context_length", 0, "0"),
    value_case(45, "context_length", 2**64 - 1, str(2**64 - 1), kind=UINT64),
    Case(45, "no context_length", without("context_length"), HyperparameterError, ("context_length",)),
    *(Case(56, f"no {name}", lambda f, name=name: drop_tensors(f, name), WeightError, (name, "missing", shape))  # type: ignore[misc]
      for name, shape in [("token_embd.weight", "[64, 320]"), ("output_norm.weight", "[64]"), (UP, "[64, 96]")]),
    Case(56, "renamed", renamed(UP, "blk.1.ffn_upp.weight"), WeightError, (UP, "missing")),
    Case(56, "transposed", shaped(UP, 96, 64), WeightError, (UP, "[96, 64]", "[64, 96]")),
    Case(56, "a norm in two dimensions", shaped(NORM, 32, 2), WeightError, (NORM, "[32, 2]", "[64]")),
    Case(56, "a norm lying down", shaped(NORM, 1, 64), WeightError, (NORM, "[1, 64]", "[64]")),
    Case(56, "a flat embedding", shaped("token_embd.weight", 64 * 320), WeightError, ("token_embd.weight", "[20480]", "[64, 320]")),
    value_case(59, "vocab_size", 319, "319", "320 rows"),
    value_case(59, "vocab_size", 2**31, "2147483648"),
    value_case(59, "vocab_size", 0, "0"),
    value_case(60, "feed_forward_length", 0, "0"),
    Case(60, "another feed_forward_length", key("feed_forward_length", 95), WeightError, ("ffn_gate", "96", "95")),
    value_case(62, "attention.key_length", 0, "0"),
    value_case(62, "attention.key_length", 2**31, "2147483648"),
    value_case(62, "attention.value_length", 0, "0"),
]  # fmt: skip
LLAMA = [
    value_case(42, "rope.dimension_count", 8, "head size 16", "8"),
    value_case(60, "expert_count", 2**31, "2147483648"),
    Case(60, "experts", key("expert_count", 8), HyperparameterError, ("llama.expert_used_count", "does not have")),
    Case(62, "another value_length", key("attention.value_length", 8), WeightError, ("attn_v.weight", "expected")),
    Case(
        62,
        "another key_length",
        lambda f: (key("attention.key_length", 64)(f), without("rope.dimension_count")(f)),
        WeightError,
        ("attn_q.weight", "expected"),
    ),
]
GEMMA = [
    Case(62, "another value_length", key("attention.value_length", 8), WeightError, ("attn_v.weight", "expected")),
    Case(
        62,
        "another key_length",
        lambda f: (key("attention.key_length", 64)(f), without("rope.dimension_count")(f)),
        ModelError,
        ("attn_q.weight", "expected"),
    ),
    value_case(61, "attention.sliding_window", -1, "-1", kind=INT32),
    value_case(61, "attention.sliding_window", 5.0, "integer", "5.0"),
    value_case(61, "attention.sliding_window", 2**32 - 1, "4294967295"),
    value_case(61, "attention.sliding_window_pattern", [True], "2 layers", "are 1"),
    value_case(61, "attention.sliding_window_pattern", "all", "integer", "'all'"),
    value_case(43, "rope.freq_base_swa", NAN, "above 0"),
    *(value_case(44, "final_logit_softcapping", cap, "0 (none) or above") for cap in (NAN, -1.0, INF, 1e-30)),
]
CASES = [("llama", case) for case in BOTH + LLAMA] + [("gemma3", case) for case in BOTH + GEMMA]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return {
        "llama": write_llama(folder / "llama.gguf"),
        "gemma3": write_gemma3(folder / "gemma3.gguf", n_layer=2, n_head_kv=2, head_size=16),
    }


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every native buffer that is asked for, or mapped."""
    asked: list[int] = []
    place = Buffer.place

    def counted(self: Buffer, tensor: Any, offset: int) -> None:
        asked.append(offset)
        place(self, tensor, offset)

    monkeypatch.setattr(Buffer, "place", counted)
    return asked


def answers(path: Path) -> bytes:
    with running(path, capacity=16) as executor:
        logits = feed(executor, executor.open(), TOKENS)
        assert np.isfinite(logits).all()
        return logits.tobytes()


@pytest.mark.parametrize(("base", "case"), CASES, ids=[f"{base} row {case.row}: {case.name}" for base, case in CASES])
def test_what_is_no_model_is_one_typed_error_and_the_next_file_loads(
    whole: dict[str, Path], tmp_path: Path, allocations: list[int], base: str, case: Case
) -> None:
    forge = taken_apart(whole[base])
    case.change(forge)
    path = forge.write(tmp_path / "bad.gguf")
    with GGUFFile.open(path) as file, pytest.raises(case.error) as caught:
        load_model(file, threads=1)
    for part in case.parts:
        assert part in str(caught.value)
    assert allocations == [], "weights were placed before everything was checked"
    answers(whole[base])
    assert allocations


ACCEPTED: list[tuple[str, str, Change]] = [
    ("llama", "a norm of one row", shaped(NORM, 64, 1)),
    ("llama", "a context of 2^32 - 1", key("context_length", 2**32 - 1)),
    ("llama", "a context of 2^62", key("context_length", 2**62, kind=UINT64)),
    ("llama", "an array of equal K/V heads", key("attention.head_count_kv", [2, 2])),
    ("llama", "an array of more than the layers", key("attention.head_count_kv", [2, 2, 9])),
    ("llama", "no vocab_size", without("vocab_size")),
    ("llama", "no rope dimension", without("rope.dimension_count")),
    ("llama", "no key length", lambda f: (without("attention.key_length")(f), without("attention.value_length")(f))),
    ("llama", "no experts", key("expert_count", 0)),
    ("llama", "64-bit integers", key("block_count", 2, kind=UINT64)),
    ("llama", "long factors that it has not", key("rope.scaling.type", "longrope")),
    ("gemma3", "long factors that it has not", key("rope.scaling.type", "longrope")),
    ("llama", "scaling by nothing", key("rope.scaling.factor", 0.0)),
    ("gemma3", "a window longer than the context", key("attention.sliding_window", 2**31 - 1)),
    ("gemma3", "a window longer than the text", key("attention.sliding_window", 100)),
]


@pytest.mark.parametrize(("base", "name", "change"), ACCEPTED, ids=[name for _, name, _ in ACCEPTED])
def test_what_only_looks_wrong_gives_the_same_answer(
    whole: dict[str, Path], tmp_path: Path, base: str, name: str, change: Change
) -> None:
    forge = taken_apart(whole[base])
    change(forge)
    assert answers(forge.write(tmp_path / "odd.gguf")) == answers(whole[base])


def test_a_window_of_zero_is_none(whole: dict[str, Path], tmp_path: Path) -> None:
    forge = taken_apart(whole["gemma3"])
    key("attention.sliding_window", 0)(forge)
    with running(forge.write(tmp_path / "odd.gguf"), capacity=16) as executor:
        assert executor.cache.windows == (Window(0),)
        assert set(executor.model.hp.window) == {0}


def test_a_file_taken_apart_and_written_again_is_the_same_model(whole: dict[str, Path], tmp_path: Path) -> None:
    for path in whole.values():
        assert answers(taken_apart(path).write(tmp_path / "again.gguf")) == answers(path)


def test_tensors_that_nobody_uses_are_told_of(
    whole: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # row 57
    forge = taken_apart(whole["llama"])
    forge.tensor("mystery.weight", np.zeros((2, 3), np.float32))
    forge.tensor("mystery.count", np.zeros(4, np.int32))
    path = forge.write(tmp_path / "more.gguf")
    with caplog.at_level(logging.WARNING, "ggml_engine.weights"):
        assert answers(path) == answers(whole["llama"])
    told = [record.message for record in caplog.records]
    assert [name for name in ("mystery.weight", "mystery.count") if any(name in text for text in told)] != []
    assert len(told) == 2
    assert all(str(path) in text for text in told)


def test_a_string_typed_number_names_both_types(whole: dict[str, Path], tmp_path: Path) -> None:
    forge = taken_apart(whole["llama"])
    set_key(forge, "llama.context_length", "512", kind=STRING)
    with GGUFFile.open(forge.write(tmp_path / "bad.gguf")) as file, pytest.raises(HyperparameterError) as caught:
        load_model(file)
    assert caught.value.key == "llama.context_length"
    assert "integer" in caught.value.reason
    assert "'512'" in caught.value.reason


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_norm.weight"]
)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("attention", ["matmul", "flash"])
def test_weights_that_are_no_numbers_run_to_logits_that_are_none(
    whole: dict[str, Path], tmp_path: Path, name: str, value: float, attention: str
) -> None:  # row 37: the executor gives what was computed; sampling from it is what refuses
    forge = taken_apart(whole["gemma3"])
    tensor = find_tensor(forge, name)
    tensor.data = np.full(math.prod(tensor.shape), value, np.float32).tobytes()
    with running(forge.write(tmp_path / "nan.gguf"), capacity=16, attention=attention) as executor:
        sequence = executor.open()
        logits = feed(executor, sequence, TOKENS)
        logits = np.concatenate([logits, feed(executor, sequence, TOKENS, 1)])
        assert logits.shape == (8, 320)
        if not math.isfinite(value):
            assert not np.isfinite(logits).all()
