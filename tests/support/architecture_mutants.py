"""What a file can say wrongly about a model of any architecture, tried in children of a child.

    python architecture_mutants.py N SEED MODEL.gguf...

The keys are those that the architecture asks the file for, there or not; each gets every value of `VALUES`. Heads are of
other sizes, with as many elements in all, so that the weights still fit. A tensor of each name in a layer is missing, of
another shape, of another type. Each mutant has its own forked process, which loads
it, prefills and decodes. N of them are tried of each model (0: all). Prints one line of JSON: by model, how many were
refused by a typed error, ran, or came to a typed error later, and those that did otherwise: a signal, an endless run,
another exception, or logits that are no numbers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from forged_models import drop_key, drop_tensors, find_tensor, set_key, taken_apart
from gguf_forge import FLOAT64, INT32, STRING, UINT64, GGUFForge
from mutant_child import N_DECODE, N_PREFILL, fork_one

from ggml_engine.errors import EngineError, GGUFError, ModelError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml import library
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.model import Model, load_model
from ggml_engine.models.registry import find_architecture

RAN, REFUSED, FAILED_TYPED, NOT_FINITE = 0, 10, 11, 13
NAN, INF = float("nan"), float("inf")
F16, I8, I32, Q4_0 = 1, 24, 26, 2
# a value and the type that it is written with; a list stands for one value in each layer
VALUES: tuple[tuple[Any, int | None], ...] = (
    *((n, None) for n in (0, 1, 2, 3, 7, 1000, 2**31 - 1, 2**31, 2**32 - 1)),
    (-1, INT32), (2**64 - 1, UINT64),
    *((x, None) for x in (NAN, INF, -INF, 0.0, -1.0, 0.5, 1e-30, 1e30)), (1e300, FLOAT64),
    ("magic", STRING), ("", STRING), ("yarn", STRING), (True, None), (False, None),
    *(([x], None) for x in (0, 1, 2, 3, 2**31, NAN, 0.5, "magic", True)),
)  # fmt: skip
Change = Callable[[GGUFForge], object]


def asked_keys(path: Path) -> list[str]:
    """All keys that the architecture of a file looks for in it."""
    asked: set[str] = set()

    class Recorder(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

    with GGUFFile.open(path) as file:
        architecture = find_architecture(file)
        file.metadata = MappingProxyType(Recorder(file.metadata))  # type: ignore[assignment]
        architecture.hyperparameters(MetadataReader(file, architecture.name))
    return sorted(key for key in asked if not key.startswith(("general.", "tokenizer.")))


def mutants(path: Path, forge: GGUFForge) -> Iterator[tuple[str, Change]]:
    """Every change, with a name."""
    n_layer = next(value.value for value in forge.values if str(value.key).endswith(".block_count"))
    for key in asked_keys(path):
        yield f"no {key}", lambda f, key=key: drop_key(f, key)  # type: ignore[misc]
        for value, kind in VALUES:
            whole = value * n_layer if isinstance(value, list) else value
            kinds = {} if kind is None else {"kind": kind}
            yield f"{key} = {value!r}", lambda f, key=key, v=whole, k=kinds: set_key(f, key, v, **k)  # type: ignore[misc]
        for values in ([1], [0] * (n_layer - 1) + [3], [1, 2] * n_layer):
            yield f"{key} = {values[:4]!r}...", lambda f, key=key, v=values: set_key(f, key, v)  # type: ignore[misc]
    for n_times in (2, 4, 8, 16, 0.5, 0.25):
        yield f"{n_times} times the heads", lambda f, n=n_times: _heads(f, n)  # type: ignore[misc]
    seen = set()
    for tensor in forge.tensors:
        name, part = str(tensor.name), re.sub(r"blk\.\d+", "blk", str(tensor.name))
        if part not in seen:
            seen.add(part)
            yield from _of_tensor(name, tensor.shape)


def _heads(forge: GGUFForge, n_times: float) -> None:
    """So many times the heads, each the smaller for it."""
    of_name = {str(value.key): value.value for value in forge.values}
    prefix = of_name["general.architecture"]
    n_head = of_name[f"{prefix}.attention.head_count"]
    size = of_name.get(f"{prefix}.attention.key_length", of_name[f"{prefix}.embedding_length"] // n_head)
    n_rot = of_name.get(f"{prefix}.rope.dimension_count", size)
    counts = {"attention.head_count": n_head, "attention.head_count_kv": of_name[f"{prefix}.attention.head_count_kv"]}
    sizes = {"attention.key_length": size, "attention.value_length": size, "rope.dimension_count": n_rot}
    for name, n in counts.items():
        set_key(forge, f"{prefix}.{name}", max(1, int(n * n_times)))
    for name, n in sizes.items():
        set_key(forge, f"{prefix}.{name}", max(1, int(n / n_times)))
    for tensor in forge.tensors:
        if re.search(r"attn_[qk]_norm", str(tensor.name)) and tensor.shape == (size,):
            _resize(tensor, max(1, int(size / n_times)))
        elif "sinks" in str(tensor.name):
            _resize(tensor, max(1, int(n_head * n_times)))


def _resize(tensor: Any, n: int) -> None:
    """A row of f32 of another length."""
    tensor.shape, tensor.data = (n,), (tensor.data * (4 * n // len(tensor.data) + 1))[: 4 * n]


def _of_tensor(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Change]]:
    yield f"no {name}", lambda f: drop_tensors(f, name)
    first, rest = shape[0], shape[1:]
    n_rest = int(np.prod(rest)) if rest else 1
    shapes = {
        "flat": (first * n_rest,), "transposed": (*reversed(shape),), "one shorter": (first - 1, *rest),
        "one row fewer": (first, *rest[:-1], max(1, rest[-1] - 1)) if rest else (1,), "half of it": (first // 2, *rest),
        "one more axis": (*shape, 2), "no columns": (0, *rest), "no rows": (*shape[:-1], 0), "one element": (1,),
        "huge": (2**40, *rest), "no axes": (), "twice": (first * 2, *rest),
    }  # fmt: skip
    for label, other in shapes.items():
        if other != shape:
            yield f"{name} {label}", lambda f, other=other: _shape(f, name, other)  # type: ignore[misc]
    for kind, width in ((F16, 2.0), (I8, 1.0), (I32, 4.0), (Q4_0, 18 / 32), (99, 4.0)):
        yield f"{name} of type {kind}", lambda f, k=kind, w=width: _type(f, name, k, w)  # type: ignore[misc]


def _shape(forge: GGUFForge, name: str, shape: tuple[int, ...]) -> None:
    tensor = find_tensor(forge, name)
    n_bytes = min(4 * int(np.prod(shape, dtype=object)), 1 << 22)
    tensor.shape, tensor.kind = shape, 0
    tensor.data = (tensor.data * (n_bytes // max(1, len(tensor.data)) + 1))[:n_bytes]


def _type(forge: GGUFForge, name: str, kind: int, width: float) -> None:
    tensor = find_tensor(forge, name)
    tensor.kind, tensor.data = kind, b"!" * int(np.prod(tensor.shape) * width)  # small numbers in most types


def copied(forge: GGUFForge) -> GGUFForge:
    """One that can be changed."""
    tensors = [dataclasses.replace(tensor) for tensor in forge.tensors]
    return dataclasses.replace(forge, values=list(forge.values), tensors=tensors)


def images(path: Path, n: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Mutants as bytes, all or `n` of them. The last ones are cut off."""
    forge = taken_apart(path)
    rng = random.Random(f"{seed} {path.name}")
    chosen = list(mutants(path, forge))
    for name, change in rng.sample(chosen, min(n, len(chosen))) if n else chosen:
        changed = copied(forge)
        change(changed)
        yield name, changed.build().data
    image = forge.build()
    for share in (rng.random(),) if n else (0.001, 0.2, 0.9, 0.999999):
        yield f"cut at {share}", image.cut(int(len(image.data) * share))
    if not n:
        yield "cut after the header", image.cut(image.header_bytes)


def run_one(path: Path, said: Path) -> int:
    """The exit code of one mutant; what its error says goes to a file."""
    try:
        file = GGUFFile.open(path)
        model = load_model(file, threads=1)
    except (ModelError, GGUFError) as error:
        said.write_text(f"{type(error).__name__}: {error}")
        return REFUSED
    try:
        finite = _runs(model, ("matmul", "flash")[zlib.crc32(path.read_bytes()) % 2])
    except EngineError as error:
        said.write_text(f"{type(error).__name__}: {error}")
        return FAILED_TYPED
    return RAN if finite else NOT_FINITE


def _runs(model: Model, attention: str) -> bool:
    executor = GgmlExecutor(model, ExecutorOptions(capacity=64, run=4, read_block=8, attention=attention))  # type: ignore[arg-type]
    sequence = executor.open()
    tokens = [i * 37 % model.hp.n_vocab for i in range(N_PREFILL + N_DECODE)]
    logits = [executor.forward(Batch.of_sequence(sequence, tokens[:N_PREFILL], logits="all"))]
    logits += [executor.forward(Batch.of_sequence(sequence, [token])) for token in tokens[N_PREFILL:]]
    return all(bool(np.isfinite(rows).all()) for rows in logits)


def try_all(path: Path, n: int, seed: int, folder: Path) -> dict[str, Any]:
    """The figures of one model."""
    names = {REFUSED: "refused", RAN: "ran", FAILED_TYPED: "typed"}
    counts: dict[str, Any] = {**dict.fromkeys(names.values(), 0), "bad": [], "later": []}
    mutant, said = folder / "mutant.gguf", folder / "said"
    for label, data in images(path, n, seed):
        mutant.write_bytes(data)
        said.unlink(missing_ok=True)
        status = fork_one(mutant, lambda path: run_one(path, said))
        code = os.waitstatus_to_exitcode(status)
        if code in names:
            counts[names[code]] += 1
            if code == FAILED_TYPED:
                counts["later"].append(f"{label}: {said.read_text()}")
        else:
            how = "logits are no numbers" if code == NOT_FINITE else f"exit {code}"
            counts["bad"].append(f"{label}: {how}")
    return counts


def main(n: str, seed: str, *paths: str) -> None:
    library.load()  # opened once, here: nothing has run on it when the children are made
    with tempfile.TemporaryDirectory() as folder:
        found = {Path(path).stem: try_all(Path(path), int(n), int(seed), Path(folder)) for path in paths}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
