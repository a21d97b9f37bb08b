"""Adapter files that are wrong: one typed error that names what is wrong, and nothing stays allocated."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from adapters import EVERY_MATRIX, adapter_forge, tokens_of
from architecture_rows import model_file
from engines import feed, loaded, running
from forged_models import drop_key, find_tensor, set_key
from gguf_forge import FLOAT32, FLOAT64, INT32, GGUFForge
from tiny_models import write_llama

from ggml_engine.errors import EngineError, GGUFError, HyperparameterError, OptionError, WeightError
from ggml_engine.ggml.backends import Buffer
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.models.adapter import load_adapter
from ggml_engine.models.adapter_set import AdapterSet
from ggml_engine.models.model import Model

Change = Callable[[GGUFForge], object]
Q = "blk.1.attn_q.weight"
A, B = f"{Q}.lora_a", f"{Q}.lora_b"
NAN, INF = float("nan"), float("inf")


class Case(NamedTuple):
    name: str
    change: Change
    error: type[EngineError]
    parts: tuple[str, ...]  # of the message


def key(name: str, value: object, **kinds: int) -> Change:
    return lambda forge: set_key(forge, name, value, **kinds)


def shaped(name: str, *shape: int) -> Change:
    def change(forge: GGUFForge) -> None:
        tensor = find_tensor(forge, name)
        tensor.shape, tensor.data = shape, bytes(4 * math.prod(shape))

    return change


def typed(name: str, kind: int, width: int) -> Change:
    def change(forge: GGUFForge) -> None:
        tensor = find_tensor(forge, name)
        tensor.kind, tensor.data = kind, bytes(math.prod(tensor.shape) * width)

    return change


def renamed(name: str, to: str) -> Change:
    return lambda forge: setattr(find_tensor(forge, name), "name", to)


def without(name: str) -> Change:
    return lambda forge: forge.tensors.remove(find_tensor(forge, name))


def pair(name: str, a: tuple[int, int], b: tuple[int, int]) -> Change:
    """Adds a pair of zeros; shapes are numpy's."""

    def change(forge: GGUFForge) -> None:
        forge.tensor(f"{name}.lora_a", np.zeros(a, np.float32))
        forge.tensor(f"{name}.lora_b", np.zeros(b, np.float32))

    return change


H, W = HyperparameterError, WeightError
CASES = [
    Case("no kind", lambda f: drop_key(f, "general.type"), H, ("general.type", "'adapter'", "no value")),
    Case("a model", key("general.type", "model"), H, ("general.type", "'adapter'", "'model'")),
    Case("a kind that is a number", key("general.type", 7), H, ("general.type", "7")),
    Case("another kind of adapter", key("adapter.type", "control"), H, ("adapter.type", "'lora'", "'control'")),
    Case("no kind of adapter", lambda f: drop_key(f, "adapter.type"), H, ("adapter.type", "no value")),
    Case("another architecture", key("general.architecture", "qwen2"), H, ("general.architecture", "'llama'", "'qwen2'")),
    Case("no architecture", lambda f: drop_key(f, "general.architecture"), H, ("general.architecture", "no value")),
    *(Case(f"alpha {alpha}", key("adapter.lora.alpha", alpha, kind=FLOAT32), H, ("adapter.lora.alpha", "finite"))
      for alpha in (NAN, INF, -INF)),
    Case("alpha beyond f32", key("adapter.lora.alpha", 1e300, kind=FLOAT64), H, ("adapter.lora.alpha", "finite")),
    Case("alpha as text", key("adapter.lora.alpha", "8"), H, ("adapter.lora.alpha", "number")),
    Case("alpha as a flag", key("adapter.lora.alpha", True), H, ("adapter.lora.alpha", "number")),
    Case("tokens that switch it on", key("adapter.alora.invocation_tokens", [1, 2]), H, ("alora", "after certain tokens")),
    Case("no a", without(A), W, (A, "missing", B)),
    Case("no b", without(B), W, (B, "missing", A)),
    Case("unknown ending", renamed(A, f"{Q}.lora_c"), W, (f"{Q}.lora_c", ".lora_a")),
    Case("a whole matrix", renamed(A, Q), W, (Q, ".lora_a")),
    Case("a layer that is not there", pair("blk.2.attn_q.weight", (4, 64), (64, 4)), W, ("blk.2.attn_q.weight",)),
    Case("a name of no tensor", pair("x", (4, 64), (64, 4)), W, ("'x'", "another model")),
    Case("no name at all", pair("", (4, 64), (64, 4)), W, ("another model",)),
    Case("a norm", pair("blk.0.attn_norm.weight", (4, 64), (1, 4)), W, ("attn_norm", "multiplied elementwise")),
    Case("another width in", shaped(A, 65, 4), W, (A, "[65, 4]", "[64, 4]")),
    Case("another width out", shaped(B, 4, 65), W, (B, "[4, 65]", "[4, 64]")),
    Case("ranks that differ", shaped(A, 64, 5), W, (A, "[64, 5]", "[64, 4]")),
    Case("a turned round", shaped(A, 4, 64), W, (A, "[4, 64]")),
    Case("a third dimension", shaped(A, 64, 4, 2), W, (A, "[64, 4, 2]")),
    Case("an embedding as a matrix", pair("token_embd.weight", (4, 64), (320, 4)), W, ("token_embd", "expected")),
    *(Case(f"type {label} of {name}", typed(name, kind, width), W, (name, label))
      for label, kind, width in (("I8", 24, 1), ("I32", 26, 4), ("F64", 28, 8)) for name in (A, B)),
    Case("rank 0", shaped(A, 64, 0), GGUFError, (A,)),
    Case("data beyond the file", lambda f: setattr(find_tensor(f, B), "offset", 1 << 40), GGUFError, (B,)),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with loaded(write_llama(tmp_path_factory.mktemp("model") / "m.gguf"), threads=1) as model:
        yield model


def forge_for(model: Model) -> GGUFForge:
    return adapter_forge(Path(model.file.path), names=EVERY_MATRIX)


@pytest.fixture
def open_things(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many files and buffers are open that were opened since."""
    counts = {"files": 0, "buffers": 0}

    def count(owner: type, name: str, what: str, step: int) -> None:
        original = getattr(owner, name)
        is_method = not isinstance(owner.__dict__[name], classmethod)

        def counted(*arguments: object, **options: object) -> object:
            result = original(*arguments, **options)
            counts[what] += step
            return result

        monkeypatch.setattr(owner, name, counted if is_method else staticmethod(counted))

    count(GGUFFile, "open", "files", 1)
    count(GGUFFile, "close", "files", -1)
    count(Buffer, "map_host", "buffers", 1)
    count(Buffer, "allocate", "buffers", 1)
    count(Buffer, "free", "buffers", -1)
    return counts


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_wrong_file_is_refused_with_what_is_wrong(
    model: Model, tmp_path: Path, open_things: dict[str, int], case: Case
) -> None:
    forge = forge_for(model)
    case.change(forge)
    with pytest.raises(case.error) as caught:
        load_adapter(model, forge.write(tmp_path / "a.gguf"))
    assert type(caught.value) is case.error
    for part in case.parts:
        assert part in str(caught.value)
    assert open_things == {"files": 0, "buffers": 0}


def test_a_file_that_ends_early_is_refused_wherever_it_ends(
    model: Model, tmp_path: Path, open_things: dict[str, int]
) -> None:
    image = forge_for(model).build()
    path = tmp_path / "a.gguf"
    ends = np.linspace(1, len(image.data) - 40, 60).astype(int).tolist()
    for end in ends:
        path.write_bytes(image.cut(end))
        with pytest.raises(GGUFError):
            load_adapter(model, path)
    assert open_things == {"files": 0, "buffers": 0}
    path.write_bytes(image.data)
    load_adapter(model, path).free()
    assert open_things == {"files": 0, "buffers": 0}


def test_no_changed_byte_of_a_header_ends_the_process(model: Model, tmp_path: Path) -> None:
    """A file that is taken must give a graph: every shape that it leaves is computed."""
    image = adapter_forge(Path(model.file.path), names=r"blk\.0\.attn_(q|output)").build()
    path = tmp_path / "a.gguf"
    rng = np.random.default_rng(5)
    n_refused = n_taken = 0
    with running(Path(model.file.path), attention="matmul") as executor:
        for _ in range(300):
            data = bytearray(image.data)
            at = int(rng.integers(image.header_bytes))
            data[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(data)
            try:
                adapter = load_adapter(executor.model, path)
                sequence = executor.open(AdapterSet.of([(adapter, 1.0)]))
            except EngineError:
                n_refused += 1
                continue
            n_taken += 1
            feed(executor, sequence, tokens_of(1, 4))
            executor.close(sequence)
            executor.drop_adapter(adapter)
    assert n_refused > 100
    assert n_taken > 5


def test_a_file_that_is_not_there_is_told_so(model: Model, tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="not-found"):
        load_adapter(model, tmp_path / "none.gguf")


def test_a_model_is_no_adapter(model: Model) -> None:
    with pytest.raises(HyperparameterError, match=r"general\.type"):
        load_adapter(model, model.file.path)


def test_norms_that_a_file_brings_along_are_told_of_and_ignored(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forge = forge_for(model)
    forge.tensor("blk.0.attn_norm.weight", np.ones(64, np.float32))
    with caplog.at_level(logging.WARNING):
        adapter = load_adapter(model, forge.write(tmp_path / "a.gguf"))
    assert "attn_norm.weight" in caplog.text
    assert len(adapter.pairs) == 2 * 7 + 1
    adapter.free()


def test_matrices_by_head_are_refused(tmp_path: Path) -> None:
    path = model_file("deepseek2")
    with loaded(path) as model:
        name = next(name for name in model.weights if "attn_k_b" in name)
        file = adapter_forge(path, names=re.escape(name)).write(tmp_path / "a.gguf")
        with pytest.raises(WeightError, match="every head"):
            load_adapter(model, file)


def test_alpha_may_be_any_kind_of_number(model: Model, tmp_path: Path) -> None:
    for value, kinds in ((8, {"kind": INT32}), (8.0, {"kind": FLOAT64})):
        forge = forge_for(model)
        set_key(forge, "adapter.lora.alpha", value, **kinds)
        adapter = load_adapter(model, forge.write(tmp_path / "a.gguf"))
        assert adapter.factor(0.5, 4) == 1.0
        adapter.free()


def test_a_scale_that_alpha_makes_infinite_is_refused(model: Model, tmp_path: Path) -> None:
    forge = adapter_forge(Path(model.file.path), alpha=3e38, rank=1)
    with running(Path(model.file.path), attention="matmul") as executor:
        adapter = load_adapter(executor.model, forge.write(tmp_path / "a.gguf"))
        with pytest.raises(OptionError, match="too much"):
            executor.open(AdapterSet.of([(adapter, 2.0)]))
        adapter.free()
