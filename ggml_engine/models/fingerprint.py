"""A name for a model that follows from what its K/V and logits depend on.

Covered: the architecture's name, all hyperparameters, and of every tensor of the file its name, type, shape and
`_SAMPLES` times `_SAMPLE_BYTES` bytes, first and last ones among them; of a stack of matrices, as experts are, the last
ones of each. Not covered: the other bytes of the weights (two
files that differ in those alone have one fingerprint: what must not be mistaken for another needs a hash of the file),
the vocabulary and the rest of the metadata, where the file lies and how it is split, and how it is executed: device,
threads, K/V types, rearranged weights.
"""

from __future__ import annotations

import math

from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.gguf_metadata import GGUFArray, GGUFType
from ggml_engine.models.config import Hyperparameters

_FORM = b"ggml-engine model fingerprint 1\n"
_SAMPLES = 3
_MOST_SAMPLES = 1024  # as many experts as a model may have
_SAMPLE_BYTES = 64


def fingerprint(file: GGUFFile, hp: Hyperparameters) -> str:
    """64 hexadecimal digits, the same in every process. The file must be open; a few pages of each tensor are read."""
    return _digest(file, f"{hp!r}\n")  # numbers, names and tuples, every float to its last bit


def metadata_fingerprint(file: GGUFFile) -> str:
    """As `fingerprint`, where nobody here has read the hyperparameters: all metadata of the architecture is covered."""
    prefix = f"{file.metadata.get('general.architecture')}."
    values = {key: value for key, value in sorted(file.metadata.items()) if key.startswith(prefix)}
    plain = {
        key: value.strings() if value.kind is GGUFType.STRING else value.numpy().tolist()
        for key, value in values.items()
        if isinstance(value, GGUFArray)
    }
    return _digest(file, f"{prefix} { ({**values, **plain})!r}\n")


def _digest(file: GGUFFile, hyperparameters: str) -> str:
    import hashlib  # noqa: PLC0415  # it loads OpenSSL, and a start needs none

    digest = hashlib.sha256(_FORM)
    digest.update(hyperparameters.encode())
    for name, info in sorted(file.tensors.items()):
        digest.update(f"{name!r} {info.type.name} {tuple(info.shape)}\n".encode())
        data = file.tensor_bytes(name)
        for start in _sample_starts(data.nbytes, math.prod(info.shape[2:])):
            digest.update(data[start : start + _SAMPLE_BYTES])
    return digest.hexdigest()


def _sample_starts(n_bytes: int, n_matrices: int) -> list[int]:
    """Where samples of a tensor begin: at equal distances, the last one ending where the tensor does."""
    last, n = max(0, n_bytes - _SAMPLE_BYTES), min(max(_SAMPLES - 1, n_matrices), _MOST_SAMPLES)
    return [last * i // n for i in range(n + 1)]
