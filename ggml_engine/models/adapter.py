"""`Adapter`: low-rank changes of a model's matrices, W + B A (LoRA, Hu et al. 2021, arXiv:2106.09685), from a GGUF.

Owns the file's checks and the two tensors of every pair. For a matrix X of shape [in, out] the file has X.lora_a
[in, rank] and X.lora_b [rank, out]; experts have a third dimension. For the token embedding the pair is turned round:
[rank, vocabulary] and [rank, width], so that rows of the first can be looked up. Knows no graph and no sequence.
The keys are those that llama.cpp's src/llama-adapter.cpp reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ggml_engine.errors import HyperparameterError, OptionError, WeightError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.ops import Tensor
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.weights import Role, TensorSpec, Weights, load_weights

if TYPE_CHECKING:
    from ggml_engine.models.model import Model

_FORM: Final = b"ggml-engine adapter fingerprint 1\n"
_A, _B = ".lora_a", ".lora_b"
_EMBEDDING: Final = "token_embd.weight"
_INVOCATION: Final = "adapter.alora.invocation_tokens"


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """What is added to one matrix: b (a x), [in, rank] and [rank, out] (and by expert)."""

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        """The width between the two."""
        return self.b.ne[0]


class Adapter:
    """A loaded adapter of one model. `pairs` are by the names of the model's tensors, ".weight" included.

    Compared by identity. `fingerprint` names all its numbers: 64 hexadecimal digits, the same in every process.
    """

    def __init__(self, model: Model, file: GGUFFile, alpha: float, weights: Weights) -> None:
        self.model = model
        self.path = file.path
        self.alpha = alpha
        self._file = file
        self._weights = weights
        names = [name.removesuffix(_A) for name in weights if name.endswith(_A)]
        self.pairs: Mapping[str, AdapterPair] = {n: AdapterPair(weights[n + _A], weights[n + _B]) for n in names}
        self.fingerprint = _fingerprint(file, alpha)
        self.is_closed = False

    def factor(self, scale: float, rank: int) -> float:
        """What a pair's product is multiplied by, in f32: scale * alpha / rank, or the scale where alpha is 0."""
        if not self.alpha:
            return scale
        with np.errstate(over="ignore", under="ignore"):
            return float(np.float32(scale) * np.float32(self.alpha) / np.float32(rank))

    def check_scale(self, scale: float) -> None:
        """Raise OptionError for a scale that is too much for this alpha."""
        for rank in {pair.rank for pair in self.pairs.values()}:
            if not np.isfinite(self.factor(scale, rank)):
                raise OptionError(f"a scale of {scale} is too much for {self.path}, whose alpha is {self.alpha}")

    def free(self) -> None:
        """Free the tensors; idempotent. Graphs over them must be gone."""
        self.is_closed = True
        self.pairs = {}
        self._weights.free()
        self._file.close()

    def __repr__(self) -> str:
        return f"<Adapter {self.path}, {'closed' if self.is_closed else f'{len(self.pairs)} matrices'}>"


def load_adapter(model: Model, path: str | os.PathLike[str]) -> Adapter:
    """Load the adapter at `path`, whole, for a model; its pairs lie where the layers compute that they change.

    Raises GGUFError; HyperparameterError for a file that is no such adapter, or one of another architecture;
    WeightError for pairs that do not fit the model; AllocationError. Then nothing stays allocated.
    """
    with ExitStack() as undo:
        file = GGUFFile.open(path, mmap=False)
        undo.callback(file.close)
        _check_kind(file, model.hp.architecture)
        alpha = MetadataReader(file, "adapter.lora").number("alpha", lambda _: True, "a finite number", 0.0)
        weights = load_weights(
            model.libraries,
            file,
            _pair_specs(model, file),
            device=model.backends[0].device,
            n_layer=model.hp.n_layer,
            gpu_layers=model.n_offloaded,
            repack=False,
        )
        undo.callback(weights.free)
        adapter = Adapter(model, file, alpha, weights)
        undo.pop_all()
    return adapter


def _check_kind(file: GGUFFile, architecture: str) -> None:
    wanted = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": architecture}
    for key, value in wanted.items():
        found = file.metadata.get(key)
        if not isinstance(found, str) or found != value:
            shown = "no value" if found is None else f"{found!r:.60}"
            raise HyperparameterError(key, f"an adapter for this model has {value!r} here, {file.path} has {shown}")
    if _INVOCATION in file.metadata:
        raise HyperparameterError(_INVOCATION, f"{file.path} begins to act after certain tokens, which is not built")


def _pair_specs(model: Model, file: GGUFFile) -> list[TensorSpec]:
    changed = {}
    for name in file.tensors:
        if name.endswith((_A, _B)):
            changed[name[: -len(_A)]] = name
        elif not name.endswith("_norm.weight"):  # whole norms, which some files have, are ignored as libllama does
            raise WeightError(name, f"a tensor of an adapter ends with {_A} or {_B}")
    specs = {spec.name: spec for spec in model.architecture.tensors(model.hp) if spec.name in model.weights}
    found = []
    for name, of_file in changed.items():
        if name not in specs:
            raise WeightError(of_file, f"the model has no {name!r} to be changed: is this for another model?")
        found += _specs_of_pair(file, specs[name], of_file)
    return found


def _specs_of_pair(file: GGUFFile, base: TensorSpec, of_file: str) -> list[TensorSpec]:
    name, is_embedding = base.name, base.name == _EMBEDDING
    if base.role not in {Role.MATMUL, Role.EXPERTS} and not is_embedding:
        raise WeightError(of_file, f"{name} is {base.role.value}: adapters change matrices that are multiplied")
    if base.role is Role.MATMUL and len(base.shape) > 2:
        raise WeightError(of_file, f"{name} has a matrix for every head, which no adapter changes here")
    for part in (_A, _B):
        if name + part not in file.tensors:
            raise WeightError(name + part, f"is missing; the file has {of_file}")
    rank = file.tensors[name + _B].shape[0]
    n_in, n_out, *experts = base.shape if len(base.shape) > 1 else (*base.shape, 1)
    if is_embedding:
        return [
            TensorSpec(name + _A, (rank, n_out), Role.ROWS, base.layer),
            TensorSpec(name + _B, (rank, n_in), Role.MATMUL, base.layer),
        ]
    return [
        TensorSpec(name + _A, (n_in, rank, *experts), base.role, base.layer),
        TensorSpec(name + _B, (rank, n_out, *experts), base.role, base.layer),
    ]


def _fingerprint(file: GGUFFile, alpha: float) -> str:
    """Of all bytes: adapters are small, and steps of one training differ in few numbers."""
    import hashlib  # noqa: PLC0415  # it loads OpenSSL, and a start needs none

    digest = hashlib.sha256(_FORM)
    digest.update(f"{alpha!r}\n".encode())
    for name, info in sorted(file.tensors.items()):
        digest.update(f"{name!r} {info.type.name} {tuple(info.shape)}\n".encode())
        digest.update(file.tensor_bytes(name))
    return digest.hexdigest()
