"""Metadata that cannot be, of keys that single architectures have: one typed error that names the key, at loading.

The bases are models of `architecture_rows`. Keys that all have: test_model_mutations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from architecture_rows import ROWS, model_file
from engines import feed, running
from forged_models import drop_key, drop_tensors, set_key, taken_apart
from gguf_forge import INT32, GGUFForge

from ggml_engine.errors import HyperparameterError, ModelError, WeightError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.models.model import load_model

Change = Callable[[GGUFForge], object]
NAN, INF = float("nan"), float("inf")


class Case(NamedTuple):
    row: str
    name: str
    change: Change
    parts: tuple[str, ...]  # of the message
    error: type[ModelError] = HyperparameterError


def value(row: str, key: str, wrong: Any, *parts: str, **kinds: int) -> Case:
    full = key if key.startswith("xielu.") else f"{ROWS[row].architecture}.{key}"
    return Case(row, f"{key} {wrong!r}", lambda forge: set_key(forge, full, wrong, **kinds), (full, *parts))


def absent(row: str, key: str) -> Case:
    full = key if key.startswith("xielu.") else f"{ROWS[row].architecture}.{key}"
    return Case(row, f"no {key}", lambda forge: drop_key(forge, full), (full,))


def without(row: str, prefix: str, *parts: str) -> Case:
    return Case(row, f"no {prefix}", lambda forge: drop_tensors(forge, prefix), (prefix, *parts), WeightError)


SHARED = "gemma4 per layer inputs, shared layers"
EXPERTS = "gemma4 experts"
SPLIT = "gemma4 split experts, some dense layers, shared layers"
PATTERN, SHARING = "attention.sliding_window_pattern", "attention.shared_kv_layers"
CASES = [
    *(value(row, "attention.sliding_window", 0, "1 to") for row in ("gemma2", "gemma4", "muse-glimmer", "exaone4 windows")),
    *(absent(row, "attention.sliding_window") for row in ("gemma4", "muse-glimmer")),
    *(value(row, "rope.freq_base_swa", base, "above 0") for row in ("gemma2", "gemma4", "muse-glimmer") for base in (NAN, 0.0)),
    Case("muse-glimmer yarn, fused", "yarn with base 1 in the window",
         lambda f: set_key(f, "muse-glimmer.rope.freq_base_swa", 1.0), ("YaRN", "base above 1")),
    *(value("gemma2", "attn_logit_softcapping", cap, "0 (none) or above") for cap in (NAN, -1.0, 1e-30)),
    *(value("muse-glimmer", "logit_scale", scale, "finite") for scale in (NAN, INF)),
    absent("muse-glimmer", "logit_scale"),
    *(value(row, "attention.value_length", 8, "key_length 16", "8") for row in ("olmo2", "exaone4", "apertus")),
    *(value(row, "rope.dimension_count", 8, "head size 16", "8") for row in ("olmo2", "exaone4", "apertus")),
    *(value("apertus", f"xielu.{name}", [0.5, NAN, 0.5, 0.5], "finite") for name in ("alpha_n", "alpha_p", "beta", "eps")),
    value("apertus", "xielu.beta", INF, "finite"),
    value("apertus", "xielu.beta", [0.5] * 3, "4 layers", "3 values"),
    value("apertus", "xielu.beta", ["a"] * 4, "4 layers", "strings"),
    value("apertus", "xielu.beta", "a", "number", "'a'"),
    absent("apertus", "xielu.eps"),
    value("glm4", "rope.dimension_sections", [2, 1, 1, 1], "fourth", "[2, 1, 1, 1]"),
    value("glm4", "rope.dimension_sections", [2, 1, 1], "four", "has 3"),
    value("glm4", "rope.dimension_sections", [2, -1, 1, 0], "-1", element_kind=INT32),
    value("glm4", "rope.dimension_sections", 2, "four", "is 2"),
    absent("gemma4", PATTERN),
    value("gemma4", PATTERN, 6, "each layer"),
    value("gemma4", PATTERN, [True] * 5, "6 layers", "are 5"),
    *(absent("gemma4", f"attention.{part}_length_swa") for part in ("key", "value")),
    value("gemma4", "attention.value_length_swa", 8, "key_length_swa 16", "8"),
    value("gemma4", "attention.value_length", 16, "key_length 32", "16"),
    Case("gemma4", "heads of 15", lambda f: [set_key(f, f"gemma4.attention.{part}_length_swa", 15) for part in ("key", "value")],
         ("key_length_swa", "even", "15")),
    value("gemma4", "attention.key_length_swa", 0, "0"),
    *(value("gemma4", "rope.dimension_count_swa", n, str(n)) for n in (0, 15, 18, 2**31)),
    Case("gemma4", "a rotation that is too wide for the window's heads",
         lambda f: drop_key(f, "gemma4.rope.dimension_count_swa"), ("dimension_count_swa", "head size 16", "32")),
    absent("gemma4", "embedding_length_per_layer_input"),
    value(SHARED, "embedding_length_per_layer_input", -1, "-1", kind=INT32),
    Case(SHARED, "a wider per-layer embedding", lambda f: set_key(f, "gemma4.embedding_length_per_layer_input", 33),
         ("per_layer_token_embd.weight", "[192, 320]", "[198, 320]"), WeightError),
    *(value(SHARED, SHARING, n, "0 to 4", str(n)) for n in (5, 6, 2**31)),
    value(SHARED, SHARING, -1, "-1", kind=INT32),
    Case(SHARED, "two layers with a window, then one that would read one that sees everything",
         lambda f: set_key(f, f"gemma4.{PATTERN}", [True, True, True, True, True, False]),
         (SHARING, "layer 5", "layer 3", "another window")),
    Case(SHARED, "other heads than those that are read", lambda f: set_key(f, "gemma4.attention.head_count_kv", [2, 2, 2, 2, 1, 2]),
         (SHARING, "layer 4", "layer 2", "other K/V heads")),
    Case(SHARED, "no layers that read others", lambda f: set_key(f, f"gemma4.{SHARING}", 0),
         ("blk.4.attn_k.weight", "missing"), WeightError),
    without(SHARED, "rope_freqs.weight", "[16]"),
    without(SHARED, "per_layer_model_proj.weight", "[64, 192]"),
    without(SHARED, "blk.1.inp_gate.weight"),
    without(EXPERTS, "blk.2.ffn_gate_inp.scale", "[64]"),
    without(EXPERTS, "blk.2.ffn_down_exps.weight", "[64, 64, 4]"),
    without(SPLIT, "blk.2.ffn_up_exps.weight", "[64, 64, 4]"),
    without(SPLIT, "blk.2.ffn_gate_exps.weight", "[64, 64, 4]"),
    absent(EXPERTS, "expert_feed_forward_length"),
    absent(EXPERTS, "expert_used_count"),
    value(EXPERTS, "expert_count", 5000, "5000"),
    value(EXPERTS, "expert_used_count", 5, "1 to 4"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{case.row}: {case.name}" for case in CASES])
def test_what_is_no_model_is_one_typed_error(tmp_path: Path, case: Case) -> None:
    forge = taken_apart(model_file(case.row))
    case.change(forge)
    with GGUFFile.open(forge.write(tmp_path / "bad.gguf")) as file, pytest.raises(case.error) as caught:
        load_model(file, threads=1)
    for part in case.parts:
        assert part in str(caught.value)


def answers(path: Path) -> bytes:
    with running(path, capacity=16) as executor:
        return feed(executor, executor.open(), [5, 9, 13, 200]).tobytes()


ACCEPTED = [
    ("gemma4", f"gemma4.{PATTERN}", [1, 1, 0, 1, 1, 0]),
    ("gemma4", "gemma4.attention.sliding_window", 2**31 - 1),
    ("gemma4", f"gemma4.{SHARING}", 0),
    ("gemma2", "gemma2.attention.sliding_window_pattern", 2),
    ("olmo2", "olmo2.attention.sliding_window", 0),
    ("exaone4", "exaone4.attention.sliding_window", 2),  # only read with 64 layers
    ("glm4", "glm4.rope.dimension_sections", [0, 0, 0, 0]),
    ("apertus", "xielu.eps", -1e-6),
]


@pytest.mark.parametrize(("row", "key", "wanted"), ACCEPTED, ids=[f"{row}: {key}" for row, key, _ in ACCEPTED])
def test_what_only_looks_wrong_gives_the_same_answer(tmp_path: Path, row: str, key: str, wanted: Any) -> None:
    forge = taken_apart(model_file(row))
    set_key(forge, key, wanted)
    assert answers(forge.write(tmp_path / "odd.gguf")) == answers(model_file(row))
