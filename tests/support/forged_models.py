"""Whole models with something wrong in them: a tiny model's file taken apart into a `GGUFForge`, changed, written again.

forge = taken_apart(write_llama(path))
set_key(forge, "llama.block_count", 0)
find_tensor(forge, "output_norm.weight").shape = (1, 64)
forge.write(path)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from gguf_forge import ARRAY, GGUFForge, _Tensor


def taken_apart(path: Path) -> GGUFForge:
    """A forge that writes the same model."""
    reader = gguf.GGUFReader(path)
    forge = GGUFForge()
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        kind = int(field.types[0])
        forge.put(key, field.contents(), kind=kind, element_kind=int(field.types[-1]) if kind == ARRAY else None)
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in tensor.shape)
        forge.tensor(tensor.name, shape=shape, kind=int(tensor.tensor_type), data=tensor.data.tobytes())
    return forge


def drop_key(forge: GGUFForge, key: str) -> None:
    """The file has no such key."""
    forge.values[:] = [value for value in forge.values if value.key != key]


def set_key(forge: GGUFForge, key: str, value: Any, **kinds: int) -> None:
    """The key has this value and no other."""
    drop_key(forge, key)
    forge.put(key, value, **kinds)


def find_tensor(forge: GGUFForge, name: str) -> _Tensor:
    """A tensor, to be changed in place."""
    (found,) = [tensor for tensor in forge.tensors if tensor.name == name]
    return found


def drop_tensors(forge: GGUFForge, prefix: str) -> None:
    """The file has no tensor whose name begins so."""
    forge.tensors[:] = [tensor for tensor in forge.tensors if not str(tensor.name).startswith(prefix)]
