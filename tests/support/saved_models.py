"""Tiny random GGUFs of any architecture: libllama says which tensors there are, from metadata alone.

`llama_model_init_from_user` builds a model from metadata and asks for the contents of each tensor. It creates every
tensor that its loader names, the optional ones too (biases, `output.weight`, frequency factors, gate and up of experts
in one), except one q/k/v weight in the place of three. `SavedModel` drops what a file shall not have, can put q, k and v
together, and take gate and up apart. Two files can be written:

* `write_model`: those tensors with the metadata as given, which is what a converter writes;
* `write_model(saver=True)`: the file of `llama_model_save_to_file`, which has libllama's own reading of the metadata and
  every tensor. libllama does not save apertus, leaves out keys that gemma4 needs, and writes ten times deepseek2's
  YaRN multiplier: these files are another model or none.

libllama ends the process on metadata that it cannot take, so both run in a child. Same arguments, same bytes.
Metadata of each architecture: `architecture_rows`. Contents of tensors: `random_tensors`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from quantised import blocks_of
from random_tensors import random_tensor
from tiny_models import BOS, EOS, UNK, VOCAB, tokens

from ggml_engine.ggml.tensor_types import TensorType

Array = npt.NDArray[np.float32]

# Scales of weights that only NVFP4 files have: libllama offers them beside every matrix.
_SCALES = r"\.(input_scale|scale)$"
_OWN_PREFIXES = ("general.", "tokenizer.", "xielu.")
_TIMEOUT_S = 60


class MakerError(AssertionError):
    """libllama made no model of this metadata."""


@dataclass(frozen=True, slots=True)
class SavedModel:
    """What a file is made from.

    Keys of `metadata` get the architecture's prefix. `drop` and `keep` are regular expressions of tensors: those that
    match `drop` are left out, and so are scales that do not match `keep`. `fused_qkv` puts a layer's q, k and v into one
    tensor, `split_experts` takes gate and up of its experts apart. `types` gives the storage of matrices by regular
    expression, the first that matches; where rows are no multiple of a type's block, F32 stays. `added` are tensors, in
    numpy's shapes, that libllama does not make; the others it makes of the metadata with what `made_with` has.
    """

    architecture: str
    metadata: Mapping[str, Any]
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    fused_qkv: bool = False
    fused_biases: bool = True  # with the weights
    split_experts: bool = False
    types: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    tokenizer: str = "llama"
    added: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)


def write_model(model: SavedModel, path: Path, *, saver: bool = False) -> Path:
    """Writes the file. Raises MakerError with what libllama said when it makes no such model."""
    spec = json.dumps({"model": asdict(model), "path": str(path), "saver": saver})
    command = [sys.executable, str(Path(__file__)), spec]
    quiet = os.environ | {"GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=quiet)
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[-12:])
        raise MakerError(f"libllama makes no {model.architecture} of this (exit {done.returncode}):\n{said}")
    return path


# ---- the child


class _TensorHead(ctypes.Structure):
    """The first members of `struct ggml_tensor`."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _add_metadata(writer: gguf.GGUFWriter, model: SavedModel) -> None:
    """Tokenizer and the model's own keys."""
    writer.add_vocab_size(VOCAB)
    texts, scores, kinds = tokens(VOCAB)
    writer.add_tokenizer_model(model.tokenizer)
    if model.tokenizer == "bert":  # it has no bytes
        kinds = [int(gguf.TokenType.NORMAL) if kind == gguf.TokenType.BYTE else kind for kind in kinds]
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    if model.tokenizer == "llama":
        writer.add_tokenizer_pre("default")
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(False)
        writer.add_add_space_prefix(True)
    for name, value in model.metadata.items():
        key = name if name.startswith(_OWN_PREFIXES) else f"{model.architecture}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def _write(path: Path, model: SavedModel, tensors: Mapping[str, Array]) -> None:
    writer = gguf.GGUFWriter(path, model.architecture)
    _add_metadata(writer, model)
    for name, values in tensors.items():
        kind = _storage(model, name, values)
        gguf.GGML_QUANT_SIZES.setdefault(kind, (kind.block_size, kind.block_bytes))  # type: ignore[call-overload]
        writer.add_tensor(name, blocks_of(values, kind), raw_dtype=kind)  # type: ignore[arg-type]  # its number counts
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _library(name: str) -> Path:
    from llama_cpp import llama_cpp as llama

    return next((Path(llama.__file__).parent / "lib").glob(f"{name}.*"))


def _storage(model: SavedModel, name: str, values: Array) -> TensorType:
    if values.ndim < 2 or not name.endswith(".weight") or "norm" in name:
        return TensorType.F32
    for pattern, kind in model.types.items():
        if re.search(pattern, name):
            found = TensorType[kind]
            return found if values.shape[-1] % found.block_size == 0 else TensorType.F32
    return TensorType.F32


def _kept(model: SavedModel, tensors: Mapping[str, Array]) -> dict[str, Array]:
    kept = {}
    for name, values in tensors.items():
        wanted = not re.search(_SCALES, name) or any(re.search(pattern, name) for pattern in model.keep)
        if wanted and not any(re.search(pattern, name) for pattern in model.drop):
            kept[name] = values
    if model.fused_qkv:
        kept = dict(_fused(kept, "weight|bias" if model.fused_biases else "weight"))
    return dict(_split(kept)) if model.split_experts else kept


def _fused(tensors: Mapping[str, Array], kinds: str) -> Iterator[tuple[str, Array]]:
    """q, k and v of a layer as rows of one tensor, where q was; as they are where a layer lacks one."""
    for name, values in tensors.items():
        part = re.fullmatch(rf"(blk\.\d+\.attn)_([qkv])\.({kinds})", name)
        names = [] if part is None else [f"{part[1]}_{letter}.{part[3]}" for letter in "qkv"]
        if part is None or not all(other in tensors for other in names):
            yield name, values
        elif part[2] == "q":
            yield f"{part[1]}_qkv.{part[3]}", np.concatenate([tensors[other] for other in names])


def _split(tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Gate and up of a layer's experts in a tensor each."""
    for name, values in tensors.items():
        if "ffn_gate_up_exps" in name:
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield name.replace("gate_up", part), half
        else:
            yield name, values


def _make(model: SavedModel, path: Path, saver: bool) -> None:
    from llama_cpp import llama_cpp as llama

    base = ctypes.CDLL(str(_library("libggml-base")))
    base.ggml_get_name.restype = ctypes.c_char_p
    base.ggml_get_name.argtypes = [ctypes.c_void_p]
    base.ggml_nbytes.restype = ctypes.c_size_t
    base.ggml_nbytes.argtypes = [ctypes.c_void_p]
    base.ggml_backend_tensor_set.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    tensors: dict[str, Array] = {}

    def fill(pointer: int, _: object) -> None:
        head = _TensorHead.from_address(pointer)
        name = base.ggml_get_name(pointer).decode()
        shape = list(head.ne)
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        values = tensors[name] = random_tensor(name, tuple(reversed(shape)), model.seed)
        assert values.nbytes == base.ggml_nbytes(pointer), f"{name} is not f32"
        base.ggml_backend_tensor_set(pointer, values.ctypes.data, 0, values.nbytes)

    bare = path.with_suffix(".metadata")
    _write(bare, replace(model, metadata={**model.metadata, **model.made_with}), {})
    metadata = base.gguf_init_from_file(str(bare).encode(), _InitParams(True, None))
    bare.unlink()
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    callback = llama.llama_model_set_tensor_data_t(fill)
    made = llama.llama_model_init_from_user(metadata, callback, None, params)
    if not made:
        raise SystemExit("llama_model_init_from_user gave null")
    if saver:
        llama.llama_model_save_to_file(made, str(path).encode())
    else:
        added = {name: random_tensor(name, tuple(shape), model.seed) for name, shape in model.added.items()}
        _write(path, model, _kept(model, tensors | added))


def main() -> None:
    """Makes the file that the argument describes."""
    spec = json.loads(sys.argv[1])
    path = Path(spec["path"])
    try:
        _make(SavedModel(**spec["model"]), path, spec["saver"])
    except BaseException:
        with suppress(FileNotFoundError):
            path.unlink()
        raise


if __name__ == "__main__":
    main()
