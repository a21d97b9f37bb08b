"""Random LoRA files for tiny models, and libllama computing with them.

forge = adapter_forge(model_path, seed=1)  # to be changed, and written
path = write_adapter(folder / "a.gguf", model_path, seed=1)
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_forge import FLOAT32, GGUFForge
from libllama_sequences import SequencesOracle

EVERY_MATRIX = r"(attn_\w+|ffn_\w+|output)\.weight$"
Type = gguf.GGMLQuantizationType


@dataclass(frozen=True, eq=False)
class FakeAdapter:
    """What an executor without a model takes for one."""

    fingerprint: str


def adapter_forge(
    model: Path, *, seed: int = 0, rank: int = 4, alpha: float | None = 8.0, names: str = EVERY_MATRIX,
    gain: float = 0.5, kind: Type = Type.F32,
) -> GGUFForge:  # fmt: skip
    """A pair for every matrix of the model whose name matches `names`, norms apart; seeds differ in every number.

    A change has the size of what it is added to, times `gain` and the factor of alpha and scale.
    """
    reader = gguf.GGUFReader(model)
    rng = np.random.default_rng(seed)
    forge = GGUFForge()
    forge.put("general.type", "adapter")
    forge.put("general.architecture", reader.fields["general.architecture"].contents())
    forge.put("adapter.type", "lora")
    if alpha is not None:
        forge.put("adapter.lora.alpha", alpha, kind=FLOAT32)
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        if len(shape) < 2 or "norm" in tensor.name or not re.search(names, tensor.name):
            continue
        *experts, n_out, n_in = shape
        shapes = ((*experts, rank, n_in), (*experts, n_out, rank))
        if tensor.name == "token_embd.weight":
            shapes = ((n_out, rank), (n_in, rank))
        for part, shape_of_part, spread in zip("ab", shapes, (1.0, gain), strict=True):
            values = rng.standard_normal(shape_of_part, np.float32) * np.float32(spread / np.sqrt(shape_of_part[-1]))
            name = f"{tensor.name}.lora_{part}"
            if kind == Type.F32:
                forge.tensor(name, values)
            else:
                data = gguf.quants.quantize(values, kind).tobytes()
                forge.tensor(name, shape=tuple(reversed(shape_of_part)), kind=int(kind), data=data)
    assert forge.tensors
    return forge


def write_adapter(path: Path, model: Path, **options: Any) -> Path:
    """The file of `adapter_forge`."""
    return adapter_forge(model, **options).write(path)


class AdaptedOracle(SequencesOracle):
    """libllama, all of whose sequences have the same adapters."""

    def adapt(self, *scaled: tuple[Path, float]) -> None:
        """Compute with these adapters and no others from now on."""
        llama, n = self._llama, len(scaled)
        loaded = [llama.llama_adapter_lora_init(self._model, str(path).encode()) for path, _ in scaled]
        assert all(loaded)
        adapters = (llama.llama_adapter_lora_p_ctypes * n)(*loaded)
        scales = (ctypes.c_float * n)(*(scale for _, scale in scaled))
        assert llama.llama_set_adapters_lora(self._context, adapters, n, scales) == 0

    def restart(self) -> None:
        """Every sequence is empty again."""
        for sequence in range(len(self.lengths)):
            self.cut(sequence, 0)


def tokens_of(seed: int, n: int, n_vocab: int = 320) -> list[int]:
    """Random ids that are no control tokens."""
    found: Sequence[int] = np.random.default_rng(seed).integers(3, n_vocab, n).tolist()
    return list(found)
