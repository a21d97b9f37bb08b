"""What published files say of themselves is accepted and read as meant; what cannot be is an error that names its key.

Values are those of the models' own configurations, under the keys that converters write. The files here have the names
of the layers, and no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from architecture_rows import ROWS, model_file
from forged_models import drop_key, set_key, taken_apart
from gguf_forge import GGUFForge

from ggml_engine.errors import HyperparameterError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.model import load_model
from ggml_engine.models.registry import find_architecture

NAN, INF = float("nan"), float("inf")


def sizes(
    n_layer: int, n_ctx: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, base: float, eps: float = 1e-5
) -> dict[str, Any]:
    """The keys that all of them have."""
    return {
        "block_count": n_layer,
        "context_length": n_ctx,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": eps,
        "rope.freq_base": base,
    }


def heads(n: int) -> dict[str, Any]:
    """A head size that is not the embedding over the heads."""
    return {"attention.key_length": n, "attention.value_length": n}


class Published(NamedTuple):
    model: str
    architecture: str
    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]  # of some weights
    values: dict[str, Any]  # of some hyperparameters


GRANITE = {"attention.scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}
PUBLISHED = [
    Published("Qwen2.5 0.5B", "qwen2", sizes(24, 32768, 896, 4864, 14, 2, 1e6, 1e-6),
              {"attn_q.weight": (896, 896), "attn_k.weight": (896, 128), "attn_k.bias": (128,)},
              {"n_rot": 64, "n_ctx_long": 0}),
    Published("Qwen3 0.6B", "qwen3", sizes(28, 40960, 1024, 3072, 16, 8, 1e6, 1e-6) | heads(128),
              {"attn_q.weight": (1024, 2048), "attn_output.weight": (2048, 1024), "attn_k_norm.weight": (128,)},
              {"n_rot": 128, "attention_scale": float(np.float32(128) ** np.float32(-0.5))}),
    Published("Ministral 3 3B", "mistral3", sizes(26, 262144, 3072, 9216, 32, 8, 1e6) | heads(128) |
              {"vocab_size": 1, "rope.dimension_count": 128, "rope.scaling.type": "yarn", "rope.scaling.factor": 16.0,
               "rope.scaling.original_context_length": 16384, "rope.scaling.yarn_beta_fast": 32.0,
               "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_log_multiplier": 1.0,
               "attention.temperature_scale": 0.1},
              {"attn_q.weight": (3072, 4096), "attn_output.weight": (4096, 3072)}, {"n_rot": 128}),
    Published("Mistral Small 3.2", "mistral3", sizes(40, 131072, 5120, 32768, 32, 8, 1e9) | heads(128) |
              {"vocab_size": 1, "rope.dimension_count": 128},
              {"attn_q.weight": (5120, 4096), "ffn_up.weight": (5120, 32768)}, {"experts": None}),
    Published("Granite 3.3 2B", "granite", sizes(40, 131072, 2048, 8192, 32, 8, 1e7) | GRANITE |
              {"vocab_size": 1, "rope.dimension_count": 64},
              {"attn_k.weight": (2048, 512)},
              {"attention_scale": 0.015625, "logit_scale": 0.125, "residual_scale": float(np.float32(0.22))}),
    Published("Granite 4 1B", "granite", sizes(40, 131072, 2048, 4096, 16, 4, 1e7) | GRANITE |
              {"vocab_size": 1, "rope.dimension_count": 128, "expert_count": 0, "expert_used_count": 0,
               "rope.scaling.finetuned": True, "attention.head_count_kv": [4] * 40},
              {"attn_k.weight": (2048, 512)}, {"experts": None, "n_head_kv": (4,) * 40}),
    Published("Granite 3.1 1B A400M", "granitemoe", sizes(24, 131072, 1024, 512, 16, 8, 1e7) | GRANITE |
              {"vocab_size": 1, "rope.dimension_count": 64, "expert_count": 32, "expert_used_count": 8},
              {"ffn_up_exps.weight": (1024, 512, 32), "ffn_gate_inp.weight": (1024, 32)}, {"embedding_scale": 12.0}),
    Published("SmolLM3 3B", "smollm3", sizes(36, 65536, 2048, 11008, 16, 4, 5e6, 1e-6) |
              {"vocab_size": 1, "rope.dimension_count": 128},
              {"attn_k.weight": (2048, 512)}, {"n_rot": 128}),
    Published("MiniCPM 2B", "minicpm", sizes(40, 4096, 2304, 5760, 36, 36, 1e4) |
              {"vocab_size": 1, "rope.dimension_count": 64, "embedding_scale": 12.0, "residual_scale": 0.2213594,
               "logit_scale": 9.0},
              {"attn_k.weight": (2304, 2304)}, {"embedding_scale": 12.0, "logit_scale": pytest.approx(1 / 9)}),
    Published("InternLM 2.5 7B", "internlm2", sizes(32, 32768, 4096, 14336, 32, 8, 1e6) |
              {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
              {"attn_k.weight": (4096, 1024)}, {"n_rot": 128}),
    Published("AFM 4.5B", "arcee", sizes(36, 65536, 2560, 18432, 20, 4, 1e4) | heads(128) |
              {"vocab_size": 1, "rope.dimension_count": 128, "rope.scaling.type": "yarn", "rope.scaling.factor": 20.0,
               "rope.scaling.original_context_length": 4096, "rope.scaling.yarn_ext_factor": 1.0},
              {"ffn_up.weight": (2560, 18432), "attn_q.weight": (2560, 2560)}, {"n_ctx_train": 65536}),
    Published("Seed-OSS 36B", "seed_oss", sizes(64, 524288, 5120, 27648, 80, 8, 1e7, 1e-6) | heads(128),
              {"attn_q.weight": (5120, 10240), "post_attention_norm.weight": (5120,)}, {"n_rot": 128}),
    Published("ERNIE 4.5 0.3B", "ernie4_5", sizes(18, 131072, 1024, 3072, 16, 2, 5e5) | heads(128),
              {"attn_q.weight": (1024, 2048), "attn_k.weight": (1024, 256)}, {"n_rot": 128}),
    Published("ERNIE 4.5 21B A3B", "ernie4_5-moe", sizes(28, 131072, 2560, 12288, 20, 4, 5e5) | heads(128) |
              {"expert_count": 64, "expert_used_count": 6, "interleave_moe_layer_step": 1,
               "leading_dense_block_count": 1, "expert_feed_forward_length": 1536, "expert_shared_count": 2,
               "expert_shared_feed_forward_length": 3072},
              {"ffn_gate.weight": (2560, 12288)}, {"n_rot": 128}),
    Published("Hunyuan 1.8B", "hunyuan-dense", sizes(32, 262144, 2048, 6144, 16, 4, 11158839.9) | heads(128) |
              {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.dimension_count": 128,
               "rope.scaling.original_context_length": 262144},
              {"attn_q_norm.weight": (128,)}, {"n_rot": 128}),
]  # fmt: skip


def described(path: Path, architecture: str, metadata: dict[str, Any]) -> GGUFFile:
    """A file with this metadata and one element for each layer."""
    forge = GGUFForge()
    forge.put("general.architecture", architecture)
    for name, value in metadata.items():
        forge.put(f"{architecture}.{name}", value)
    forge.put("tokenizer.ggml.tokens", ["a"])
    for il in range(metadata["block_count"]):
        forge.tensor(f"blk.{il}.attn_norm.weight", np.zeros(1, np.float32))
    return GGUFFile.open(forge.write(path))


def read(file: GGUFFile) -> Hyperparameters:
    architecture = find_architecture(file)
    return architecture.hyperparameters(MetadataReader(file, architecture.name))


@pytest.mark.parametrize("published", PUBLISHED, ids=[published.model for published in PUBLISHED])
def test_published_metadata_is_read_as_meant(published: Published, tmp_path: Path) -> None:
    with described(tmp_path / "model.gguf", published.architecture, published.metadata) as file:
        hp = read(file)
        shapes = {spec.name: spec.shape for spec in find_architecture(file).tensors(hp)}
    assert {name: shapes[f"blk.0.{name}"] for name in published.shapes} == published.shapes
    assert {name: getattr(hp, name) for name in published.values} == published.values


def test_what_published_files_have_of_their_own(tmp_path: Path) -> None:
    found = {}
    for published in PUBLISHED:
        with described(tmp_path / "model.gguf", published.architecture, published.metadata) as file:
            found[published.model] = read(file)
    smollm3, ernie, ministral = (found[name] for name in ("SmolLM3 3B", "ERNIE 4.5 21B A3B", "Ministral 3 3B"))
    assert [il for il, rope in enumerate(smollm3.rope) if rope is None] == list(range(3, 36, 4))
    assert ernie.experts is not None
    assert ernie.experts.is_dense == (True,) + (False,) * 27
    assert (ernie.experts.n_ff, ernie.experts.n_ff_shared, ernie.experts.n_used) == (1536, 3072, 6)
    rope = ministral.rope[0]
    assert rope is not None
    assert (rope.ext_factor, rope.scale, rope.n_ctx_orig) == (1.0, 1 / 16, 16384)
    factors = ministral.own.of_positions(np.array([0, 16383, 16384, 49151, 49152], np.int32))  # type: ignore[attr-defined]
    assert factors.dtype == np.float32
    assert factors.tolist() == pytest.approx([1, 1, 1 + 0.1 * np.log(2), 1 + 0.1 * np.log(3), 1 + 0.1 * np.log(4)])


# ---- what cannot be

BAD: list[tuple[str, str, Any, str]] = [
    *(("qwen2", "rope.dimension_count", n, f"head size 16, is {n}") for n in (8, 2)),
    ("qwen3", "rope.dimension_count", 16, "head size 32, is 16"),
    ("qwen3", "attention.value_length", 16, "32"),
    *(("mistral3", "attention.temperature_scale", value, "0 (none) or above") for value in (NAN, INF, -0.1)),
    *(("mistral3", "rope.scaling.yarn_beta_fast", value, "above 0") for value in (NAN, 0.0, -1.0, INF)),
    ("mistral3", "rope.scaling.yarn_beta_slow", 0.0, "above 0"),
    *(("mistral3", "rope.scaling.yarn_log_multiplier", value, "0 (none) to 1000") for value in (NAN, -1.0, 1e30)),
    ("mistral3", "rope.scaling.original_context_length", 0, "is 0"),
    ("mistral3 experts", "expert_used_count", 0, "1 to 4"),
    ("mistral3 experts", "expert_used_count", 5, "1 to 4"),
    *(("granite", "logit_scale", value, "above 1e-30") for value in (0.0, -1.0, NAN, 1e-40)),
    ("granite", "logit_scale", None, "does not have"),
    *(("granite", name, value, "0 (none) or above")
      for name in ("residual_scale", "embedding_scale", "attention.scale") for value in (NAN, INF, -1.0)),
    ("granite", "rope.scaling.finetuned", 1, "true or false"),
    ("granitemoe", "expert_shared_feed_forward_length", 1 << 30, str(1 << 30)),
    ("minicpm", "logit_scale", 0.0, "above 1e-30"),
    ("ernie4_5-moe", "interleave_moe_layer_step", 0, "is 0"),
    ("ernie4_5-moe", "interleave_moe_layer_step", None, "does not have"),
    ("ernie4_5-moe", "expert_count", None, "does not have"),
    ("ernie4_5-moe", "expert_feed_forward_length", [64], "4 layers"),
    *(("hunyuan-dense", "rope.scaling.alpha", value, "0 (none) or above") for value in (NAN, -1.0, INF)),
    ("hunyuan-dense", "rope.scaling.alpha", 3e38, "base must be positive"),
    *((row, "attention.key_length", 17, "heads of 17 elements") for row in ("phi2", "glm4", "nemotron")),
    *((row, "rope.scaling.attn_factor", value, "up to 1000")
      for row in ("llama", "qwen2 tied, output bias, yarn", "phi3 longrope") for value in (0.0, 1e30, NAN)),
    *((row, "attention.causal", False, "none that follow") for row in ("qwen2", "llama")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "name", "value", "part"), BAD, ids=[f"{row}: {name} {v!r}" for row, name, v, _ in BAD])
def test_what_cannot_be_names_its_key(row: str, name: str, value: Any, part: str, tmp_path: Path) -> None:
    forge = taken_apart(model_file(row))
    key = f"{ROWS[row].architecture}.{name}"
    drop_key(forge, key)
    if value is not None:
        set_key(forge, key, value)
    with GGUFFile.open(forge.write(tmp_path / "bad.gguf")) as file, pytest.raises(HyperparameterError) as caught:
        load_model(file, threads=1)
    assert part in str(caught.value)
    assert name == "rope.scaling.alpha" or caught.value.key == key


def test_a_rotation_of_two_dimensions_is_not_stretched(tmp_path: Path) -> None:
    metadata = sizes(2, 512, 8, 16, 4, 2, 10000.0) | {"rope.scaling.alpha": 2.0}
    with (
        described(tmp_path / "bad.gguf", "hunyuan-dense", metadata) as file,
        pytest.raises(HyperparameterError) as caught,
    ):
        read(file)
    assert caught.value.key == "hunyuan-dense.rope.scaling.alpha"


def test_layers_with_experts_may_take_turns_with_dense_ones(tmp_path: Path) -> None:
    (published,) = (published for published in PUBLISHED if published.model == "ERNIE 4.5 21B A3B")
    metadata = published.metadata | {"block_count": 6, "interleave_moe_layer_step": 2, "leading_dense_block_count": 2}
    with described(tmp_path / "model.gguf", "ernie4_5-moe", metadata) as file:
        hp = read(file)
        names = {spec.name for spec in find_architecture(file).tensors(hp)}
    assert hp.experts is not None
    assert hp.experts.is_dense == (True, True, True, False, True, False)
    assert "blk.3.ffn_up_exps.weight" in names
    assert "blk.4.ffn_up.weight" in names
