"""One row per architecture (or form of one): the tiny model on which the engine is compared with libllama.

Metadata is what a converter writes. Everywhere: 64 wide, 4 heads of 16, 2 heads of K and V, 4 layers, 96 wide inside,
windows of 8, 4 experts of which 2 are used, a context of 512. Border of rope scaling where there is one: 32.

An architecture in the registry needs a row: `tests/native/test_architectures.py` runs it. To see one on its own:
`python -m pytest tests/native/test_architectures.py -k NAME`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from saved_models import SavedModel, write_model

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD = 64, 96, 4, 2, 16
WINDOW = 8
BORDER = 32  # rope.scaling.original_context_length


@dataclass(frozen=True, slots=True)
class Row:
    """`name` says which form; it begins with the architecture.

    `tolerance` gives the reason why logits are not libllama's bytes (then their normalised mean squared error is
    under 1e-6). `memory` is "attention" where any token can be cut off, "recurrent" or "hybrid" where it cannot, "none"
    for encoders. `ignored` is a regular expression of tensors that libllama takes and leaves alone.
    """

    name: str
    model: SavedModel
    tolerance: str = ""
    memory: str = "attention"
    ignored: str = ""

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`."""
        return self.model.architecture


ROWS: dict[str, Row] = {}


def _sizes(**changes: Any) -> dict[str, Any]:
    sizes = {
        "block_count": 4,
        "context_length": 512,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD_KV,
        "rope.freq_base": 10000.0,
    }
    return sizes | {key.replace("__", "."): value for key, value in changes.items()}


def _row(
    name: str,
    metadata: Mapping[str, Any] | None = None,
    *,
    architecture: str = "",
    norm: str = "rms",
    tolerance: str = "",
    memory: str = "attention",
    ignored: str = "",
    **options: Any,
) -> None:
    """`norm` says which epsilon the architecture reads. A key with None is left out."""
    epsilon = {"rms": {"attention.layer_norm_rms_epsilon": 1e-5}, "layer": {"attention.layer_norm_epsilon": 1e-5}}[norm]
    merged = {**_sizes(), **epsilon, **(metadata or {})}
    model = SavedModel(
        architecture or name, {key: value for key, value in merged.items() if value is not None}, **options
    )
    assert name not in ROWS
    ROWS[name] = Row(name, model, tolerance, memory, ignored)


EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2}
EXPERT_FF: dict[str, Any] = {**EXPERTS, "expert_feed_forward_length": 64}
DENSE_FIRST: dict[str, Any] = {"leading_dense_block_count": 1}
GROUPS: dict[str, Any] = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}
_WIDE: dict[str, Any] = {"embedding_length": 256, "expert_feed_forward_length": 256, "block_count": 2}
WINDOWED: dict[str, Any] = {"attention.sliding_window": WINDOW}
HEADS_OF_32: dict[str, Any] = {"attention.key_length": 32, "attention.value_length": 32}
YARN: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": BORDER,
}
LONGROPE: dict[str, Any] = {
    "rope.scaling.type": "longrope",
    "rope.scaling.original_context_length": BORDER,
    "rope.scaling.attn_factor": 1.19,
}
SHORT_ENOUGH: dict[str, Any] = {"rope.scaling.original_context_length": 512}  # the context of the tests
ATTENTION_BIASES = r"attn_(q|k|v|qkv|output)\.bias"
FFN_BIASES = r"ffn_(gate|up|down)\.bias"
OPTIONAL_BIASES = (ATTENTION_BIASES, FFN_BIASES)
OUTPUT = r"^output\.weight"

# ---- decoders with plain attention

_row("llama", drop=("rope_freqs", *OPTIONAL_BIASES))
_row("llama tied, biases, frequency factors", architecture="llama", drop=(OUTPUT,))
_row("llama yarn", YARN, architecture="llama", drop=("rope_freqs", *OPTIONAL_BIASES))
_row("llama linear", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, architecture="llama",
     drop=("rope_freqs", *OPTIONAL_BIASES))  # fmt: skip
_row("llama heads of 32, q4_0", HEADS_OF_32, architecture="llama", drop=("rope_freqs", *OPTIONAL_BIASES),
     types={"weight": "Q4_0"})  # fmt: skip
_row("llama experts", EXPERTS, architecture="llama", drop=("rope_freqs", *OPTIONAL_BIASES))
_row("mistral3", {**YARN, "rope.scaling.yarn_log_multiplier": 1.0, "rope.scaling.yarn_beta_fast": 32.0,
     "rope.scaling.yarn_beta_slow": 1.0, "attention.temperature_scale": 0.1},
     drop=("rope_freqs", *OPTIONAL_BIASES))  # fmt: skip
_row("mistral3 experts", EXPERTS, architecture="mistral3", drop=("rope_freqs", *OPTIONAL_BIASES))
_row("mistral3 tied, other betas, biases", {**YARN, "rope.scaling.yarn_log_multiplier": 0.7,
     "rope.scaling.yarn_beta_fast": 0.5, "rope.scaling.yarn_beta_slow": 0.1}, architecture="mistral3",
     drop=(OUTPUT,))  # fmt: skip
_row("mistral3 long factors, temperature without YaRN", {**LONGROPE, "attention.temperature_scale": 0.1},
     architecture="mistral3", drop=OPTIONAL_BIASES)  # fmt: skip
_row("qwen2", drop=(r"attn_output\.bias", r"^output\.bias", r"cls"))
_row("qwen2 tied, output bias, yarn", YARN, architecture="qwen2", drop=(r"attn_output\.bias", OUTPUT, r"cls"))
_row("qwen2 fused", architecture="qwen2", fused_qkv=True, drop=(r"attn_output\.bias", r"^output\.bias", r"cls"))
_row("qwen2moe", {**EXPERT_FF, "expert_shared_feed_forward_length": 48}, drop=(r"attn_output\.bias",))
_row("qwen2moe without widths or biases", EXPERTS, architecture="qwen2moe", drop=(ATTENTION_BIASES,))
_row("qwen2moe one expert used", {**EXPERT_FF, "expert_used_count": 1, "expert_shared_feed_forward_length": 48},
     architecture="qwen2moe", drop=(ATTENTION_BIASES,))  # fmt: skip
_row("qwen3", HEADS_OF_32, drop=(ATTENTION_BIASES, r"cls"))
_row("qwen3 tied, yarn, q8_0", {**HEADS_OF_32, **YARN}, architecture="qwen3", drop=(ATTENTION_BIASES, OUTPUT, r"cls"),
     types={"weight": "Q8_0"})  # fmt: skip
_row("qwen3 reranker", {**HEADS_OF_32, "classifier.output_labels": ["yes", "no"]}, architecture="qwen3",
     drop=(ATTENTION_BIASES,))  # fmt: skip
_row("qwen3moe", {**EXPERT_FF, **HEADS_OF_32}, drop=(ATTENTION_BIASES,))
_row("qwen3moe tied, yarn, scales of experts, widths by layer", {**EXPERTS, **YARN, "expert_feed_forward_length": [64] * 4,
     "expert_used_count": [2] * 4}, architecture="qwen3moe", drop=(OUTPUT,), keep=(r"_exps\.scale",))  # fmt: skip
_row("qwen3moe groups", {**EXPERT_FF, **GROUPS}, architecture="qwen3moe", drop=(ATTENTION_BIASES,))
_row("qwen3moe q4_0", EXPERT_FF, architecture="qwen3moe", drop=(ATTENTION_BIASES,), types={"weight": "Q4_0"})
_row("qwen3moe q8_0", EXPERT_FF, architecture="qwen3moe", drop=(ATTENTION_BIASES,), types={"weight": "Q8_0"})
_row("qwen3moe q4_k and q6_k", {**EXPERT_FF, **_WIDE}, architecture="qwen3moe", drop=(ATTENTION_BIASES,),
     types={"(gate|up)_exps": "Q4_K", "down_exps": "Q6_K"})  # fmt: skip
_row("gemma", HEADS_OF_32)
_row("gemma fused", HEADS_OF_32, architecture="gemma", drop=(ATTENTION_BIASES,), fused_qkv=True)
_row("gemma2", {**HEADS_OF_32, **WINDOWED, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0},
     drop=(ATTENTION_BIASES,))  # fmt: skip
_row("gemma2 of 46 layers, biases", {**WINDOWED, "block_count": 46, "embedding_length": 32, "feed_forward_length": 32,
     "attention.key_length": 16, "attention.value_length": 16, "rope.freq_base_swa": 500.0},
     architecture="gemma2")  # fmt: skip
_row("gemma3", {**HEADS_OF_32, **WINDOWED, "block_count": 7, "rope.freq_base": 1e6, "rope.scaling.type": "linear",
     "rope.scaling.factor": 8.0}, drop=(ATTENTION_BIASES, OUTPUT, r"dense_"))  # fmt: skip
_row("gemma3 biases, no windows", {"final_logit_softcapping": 6.0}, architecture="gemma3",
     drop=(OUTPUT, r"dense_"))  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "block_count": 6,
    "attention.sliding_window": WINDOW,
    "attention.sliding_window_pattern": [True, True, False, True, True, False],
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 10000.0,
    "final_logit_softcapping": 6.0,
}
_row("gemma4", {**_GEMMA4, "embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0}, drop=(OUTPUT,))
_row("gemma4 per layer inputs, shared layers",
     {**_GEMMA4, "embedding_length_per_layer_input": 32, "attention.shared_kv_layers": 2,
      "attention.sliding_window_pattern": [True, False, True, False, True, False]},
     architecture="gemma4", drop=(OUTPUT, r"blk\.[45]\.attn_(k|v|k_norm)\.weight"))  # fmt: skip
_row("gemma4 experts", {**_GEMMA4, **EXPERT_FF, "embedding_length_per_layer_input": 0,
     "attention.shared_kv_layers": 0}, architecture="gemma4",
     drop=(OUTPUT, r"attn_v\.weight"), keep=(r"ffn_gate_inp\.scale", r"ffn_down_exps\.scale"))  # fmt: skip
_SHARED: dict[str, Any] = {
    **_GEMMA4,
    "embedding_length_per_layer_input": 32,
    "attention.shared_kv_layers": 2,
    "attention.sliding_window_pattern": [True, False, True, False, True, False],
}
_row("gemma4 fused, shared layers, other heads, wider last layers",
     {**_SHARED, "attention.head_count_kv": [2, 4, 2, 1, 2, 1], "feed_forward_length": [96, 96, 96, 96, 192, 192],
      "rope.dimension_count": 16, "rope.dimension_count_swa": 8, "rope.scaling.factor": 4.0},
     architecture="gemma4", drop=(r"blk\.[45]\.attn_(k|v|k_norm)\.weight", "layer_output_scale"),
     fused_qkv=True)  # fmt: skip
_row("gemma4 split experts, some dense layers, shared layers", {**_SHARED, **EXPERT_FF}, architecture="gemma4",
     drop=(OUTPUT, r"blk\.[03]\.(ffn_gate_inp|ffn_\w+_exps|pre_ffw_norm_2|post_ffw_norm_[12])", r"blk\.[13]\.attn_v\."),
     keep=(r"ffn_gate_inp\.scale", r"ffn_down_exps\.scale"), split_experts=True, types={"exps": "Q4_0"})  # fmt: skip
_row("gemma4 fused everywhere, q8_0", {**_SHARED, **YARN}, architecture="gemma4", drop=(OUTPUT,), fused_qkv=True,
     types={"weight": "Q8_0"})  # fmt: skip
_row("phi2", {"attention.head_count_kv": N_HEAD, "rope.dimension_count": 8}, norm="layer")
_row("phi2 fused, biases apart", {"embedding_length": 128, "rope.dimension_count": 8}, architecture="phi2",
     norm="layer", fused_qkv=True, fused_biases=False)  # fmt: skip
_row("phi3", {"rope.dimension_count": 16}, drop=(ATTENTION_BIASES, "rope_factors"), fused_qkv=True)
_row("phi3 tied, windows not applied, part of a head", {"embedding_length": 128, "rope.dimension_count": 24, **WINDOWED},
     architecture="phi3", drop=(OUTPUT, ATTENTION_BIASES, "rope_factors"), fused_qkv=True)  # fmt: skip
_row("phi3 apart, biases", {"rope.dimension_count": 16}, architecture="phi3",
     drop=("rope_factors", r"attn_output\.bias"))  # fmt: skip
_row("phi3 longrope", {"rope.dimension_count": 16, "rope.scaling.original_context_length": BORDER,
     "rope.scaling.attn_factor": 1.19}, architecture="phi3", drop=(ATTENTION_BIASES,), fused_qkv=True)  # fmt: skip
_row("phi3 longrope, short factors", {"context_length": 4096, "rope.dimension_count": 16,
     "rope.scaling.original_context_length": 512, "rope.scaling.attn_factor": 1.19}, architecture="phi3",
     drop=(ATTENTION_BIASES,), fused_qkv=True)  # fmt: skip
_row("phi3 longrope, long factors alone", {"rope.dimension_count": 12, "rope.scaling.type": "longrope",
     "rope.scaling.original_context_length": 511}, architecture="phi3",
     drop=(ATTENTION_BIASES, "rope_factors_short"), fused_qkv=True)  # fmt: skip
_SCALED = {"logit_scale": 2.0, "residual_scale": 0.7, "embedding_scale": 3.0, "attention.scale": 0.2}
_row("granite", _SCALED, drop=("rope_freqs", *OPTIONAL_BIASES))
_row("granite tied, biases, frequency factors", _SCALED, architecture="granite", drop=(OUTPUT,))
_row("granite without rotation", {**_SCALED, "rope.scaling.finetuned": False}, architecture="granite",
     drop=("rope_freqs", *OPTIONAL_BIASES))  # fmt: skip
_row("granite only logits scaled", {"logit_scale": 2.0}, architecture="granite", drop=("rope_freqs", *OPTIONAL_BIASES))
_row("granite deepstack", {**_SCALED, "deepstack_mapping": [0, -1, 1, -1]}, architecture="granite",
     drop=("rope_freqs", *OPTIONAL_BIASES))  # fmt: skip
_row("granite experts", {**_SCALED, **EXPERTS, "expert_shared_feed_forward_length": 48}, architecture="granite",
     drop=("rope_freqs", *OPTIONAL_BIASES))  # fmt: skip
_row("granitemoe", {**_SCALED, **EXPERTS, "expert_shared_feed_forward_length": 48},
     drop=("rope_freqs", *OPTIONAL_BIASES))  # fmt: skip
_row("granitemoe without shared experts", {**_SCALED, **EXPERTS, **LONGROPE, **SHORT_ENOUGH},
     architecture="granitemoe", drop=OPTIONAL_BIASES)  # fmt: skip
_row("granitemoe dense", {**_SCALED, "expert_count": 0, "rope.scaling.finetuned": False}, architecture="granitemoe",
     drop=("rope_freqs", *OPTIONAL_BIASES))  # fmt: skip
_row("olmo2", drop=(ATTENTION_BIASES,))
_row("olmo2 windows", {**WINDOWED, **YARN}, architecture="olmo2", drop=(ATTENTION_BIASES,))
_row("olmo2 biases, fused", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, architecture="olmo2",
     fused_qkv=True)  # fmt: skip
_row("olmoe", {**EXPERTS, "attention.head_count_kv": N_HEAD}, drop=(ATTENTION_BIASES,))
_row("olmoe fused, biases", {**EXPERTS, "attention.head_count_kv": N_HEAD}, architecture="olmoe", fused_qkv=True)
_row("smollm3", {"block_count": 5}, drop=OPTIONAL_BIASES)
_row("smollm3 tied, biases, yarn", {**YARN, "block_count": 5}, architecture="smollm3",
     drop=(OUTPUT, r"attn_output\.bias", FFN_BIASES))  # fmt: skip
_row("gpt-oss", {**EXPERT_FF, **WINDOWED, **HEADS_OF_32, **YARN}, drop=())
_row("gpt-oss mxfp4", {**EXPERT_FF, **WINDOWED, **HEADS_OF_32, **YARN}, architecture="gpt-oss",
     types={r"ffn_(gate|up|down)_exps": "MXFP4"})  # fmt: skip
_row("gpt-oss two bases, other windows", {**EXPERT_FF, **WINDOWED, "rope.freq_base_swa": 500.0,
     "attention.sliding_window_pattern": [True, True, False, True]}, architecture="gpt-oss",
     drop=(r"attn_(q|k|v)\.bias",))  # fmt: skip
_row("glm4", {"rope.dimension_count": 8}, drop=(r"attn_output\.bias",))
_row("glm4 sections", {"rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0]}, architecture="glm4")
_row("glm4 tied, fused, no biases", {"rope.dimension_count": 8}, architecture="glm4",
     drop=(ATTENTION_BIASES, OUTPUT), fused_qkv=True, types={"weight": "F16"})  # fmt: skip
_row("glm4moe", {**EXPERT_FF, **DENSE_FIRST, "rope.dimension_count": 8, "expert_shared_count": 1,
     "expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 2})  # fmt: skip
_row("glm4moe what files leave out", {**EXPERT_FF, "expert_shared_count": 2, "rope.dimension_count": 8},
     architecture="glm4moe", drop=(r"attn_[qk]_norm", OUTPUT, ATTENTION_BIASES))  # fmt: skip
_row("glm4moe softmax, two dense layers, sections", {**EXPERT_FF, "leading_dense_block_count": 2,
     "expert_shared_count": 1, "expert_gating_func": 1, "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0],
     "expert_feed_forward_length": 0}, architecture="glm4moe")  # fmt: skip
_FURTHER: dict[str, tuple[int, ...]] = {
    **{f"{name}.weight": (N_EMBD,) for name in ("attn_norm", "post_attention_norm", "nextn.enorm", "nextn.hnorm")},
    **{f"attn_{name}.weight": (N_EMBD, N_EMBD) for name in ("q", "output")},
    **{f"attn_{name}.weight": (N_HEAD_KV * HEAD, N_EMBD) for name in ("k", "v")},
    **{f"ffn_{name}_exps.weight": (4, 64, N_EMBD) for name in ("gate", "up", "down")},
    **{f"ffn_{name}_shexp.weight": (64, N_EMBD) for name in ("gate", "up", "down")},
    "ffn_gate_inp.weight": (4, N_EMBD),
    "exp_probs_b.bias": (4,),
    "nextn.eh_proj.weight": (N_EMBD, 2 * N_EMBD),
}
_row("glm4moe further tokens", {**EXPERT_FF, **DENSE_FIRST, "block_count": 5, "nextn_predict_layers": 1,
     "expert_shared_count": 1}, architecture="glm4moe", made_with={"block_count": 4, "nextn_predict_layers": 0},
     added={f"blk.4.{name}": shape for name, shape in _FURTHER.items()})  # fmt: skip
_row("cohere2", {**WINDOWED, "block_count": 5, "logit_scale": 0.5}, norm="layer", drop=(ATTENTION_BIASES, OUTPUT))
_row("cohere2 heads of 32, biases, other pattern", {**WINDOWED, **HEADS_OF_32, "embedding_length": 128,
     "logit_scale": 0.0, "attention.sliding_window_pattern": [True, False, False, True]}, architecture="cohere2",
     norm="layer", drop=(r"attn_output\.bias", OUTPUT))  # fmt: skip
_row("cohere2 all in windows", {**WINDOWED, "logit_scale": 0.5, "attention.sliding_window_pattern": 0},
     architecture="cohere2", norm="layer", drop=(ATTENTION_BIASES, OUTPUT), fused_qkv=True)  # fmt: skip
_row("command-r", {"logit_scale": 0.5}, norm="layer", drop=(ATTENTION_BIASES, OUTPUT, r"attn_[qk]_norm"))
_row("command-r norms", {"logit_scale": 0.5, "block_count": 64, "embedding_length": 32, "feed_forward_length": 32},
     architecture="command-r", norm="layer", drop=(ATTENTION_BIASES, OUTPUT))  # fmt: skip
_row("command-r norms, fused", {"block_count": 64, "embedding_length": 32, "feed_forward_length": 32},
     architecture="command-r", norm="layer", drop=(ATTENTION_BIASES, OUTPUT), fused_qkv=True)  # fmt: skip
_row("command-r biases, part of a head, linear", {"logit_scale": 0.5, "rope.dimension_count": 8,
     "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, architecture="command-r", norm="layer",
     drop=(OUTPUT, r"attn_[qk]_norm", r"attn_output\.bias"))  # fmt: skip
_row("exaone4", drop=(ATTENTION_BIASES, "rope_freqs"))
_row("exaone4 tied, biases, frequency factors", architecture="exaone4", drop=(OUTPUT,))
_row("exaone4 windows", {"block_count": 64, "embedding_length": 32, "feed_forward_length": 32, **WINDOWED},
     architecture="exaone4", drop=(ATTENTION_BIASES,))  # fmt: skip
_row("ernie4_5", drop=OPTIONAL_BIASES)
_row("ernie4_5 tied, biases, linear", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
     architecture="ernie4_5", drop=(OUTPUT, r"attn_output\.bias", FFN_BIASES))  # fmt: skip
_row("ernie4_5-moe", {**EXPERT_FF, **DENSE_FIRST, "interleave_moe_layer_step": 1,
     "expert_shared_feed_forward_length": 48}, drop=OPTIONAL_BIASES)  # fmt: skip
_row("ernie4_5-moe without dense layers, shared experts and bias of choice", {**EXPERT_FF,
     "interleave_moe_layer_step": 1}, architecture="ernie4_5-moe", drop=("exp_probs_b", *OPTIONAL_BIASES))  # fmt: skip
_row("hunyuan-dense", HEADS_OF_32, drop=OPTIONAL_BIASES)
_row("hunyuan-dense tied, alpha", {**HEADS_OF_32, "rope.scaling.alpha": 50.0, "rope.dimension_sections": [4, 4, 4, 4],
     "expert_count": 1, "expert_used_count": 1}, architecture="hunyuan-dense", drop=(OUTPUT, *OPTIONAL_BIASES))  # fmt: skip
_row("seed_oss", HEADS_OF_32, drop=(r"attn_output\.bias",))
_row("seed_oss tied, no biases", architecture="seed_oss", drop=(OUTPUT, ATTENTION_BIASES))
_row("starcoder2", norm="layer")
_row("starcoder2 tied, fused", architecture="starcoder2", norm="layer", drop=(OUTPUT,), fused_qkv=True)
_row("starcoder2 yarn", YARN, architecture="starcoder2", norm="layer")
_row("stablelm", {"rope.dimension_count": 8}, norm="layer", drop=(r"attn_[qk]_norm", r"attn_output\.bias"))
_row("stablelm norms, parallel", {"rope.dimension_count": 8}, architecture="stablelm", norm="layer",
     drop=(r"ffn_norm", r"attn_output\.bias"))  # fmt: skip
_row("stablelm layers differ, no biases", {"rope.dimension_count": 8}, architecture="stablelm", norm="layer",
     drop=(r"blk\.[02]\.ffn_norm", r"blk\.1\.ffn_norm\.bias", r"blk\.[13]\.attn_q_norm", r"blk\.[23]\.attn_k_norm",
           ATTENTION_BIASES))  # fmt: skip
_row("falcon", {"attention.head_count_kv": 1}, norm="layer", fused_qkv=True,
     drop=(ATTENTION_BIASES, r"attn_norm_2", *OPTIONAL_BIASES))  # fmt: skip
_row("falcon two norms", norm="layer", architecture="falcon", fused_qkv=True, drop=OPTIONAL_BIASES)
_row("falcon tied, two norms without the second's bias", norm="layer", architecture="falcon", fused_qkv=True,
     drop=(OUTPUT, r"attn_norm_2\.bias", *OPTIONAL_BIASES))  # fmt: skip
_row("gpt2", {"attention.head_count_kv": N_HEAD, "rope.freq_base": None}, norm="layer", fused_qkv=True)
_row("gpt2 tied, q8_0", {"attention.head_count_kv": N_HEAD, "rope.freq_base": None}, architecture="gpt2", norm="layer",
     fused_qkv=True, drop=(OUTPUT,), types={"weight": "Q8_0"})  # fmt: skip
_row("gptneox", {"attention.head_count_kv": N_HEAD, "rope.dimension_count": 8, "use_parallel_residual": True},
     norm="layer", fused_qkv=True)  # fmt: skip
_row("gptneox one after the other", {"attention.head_count_kv": N_HEAD, "rope.dimension_count": 8,
     "use_parallel_residual": False}, architecture="gptneox", norm="layer", fused_qkv=True)  # fmt: skip
_row("gptneox yarn, f16", {**YARN, "attention.head_count_kv": N_HEAD, "use_parallel_residual": True},
     architecture="gptneox", norm="layer", fused_qkv=True, types={"weight": "F16"})  # fmt: skip
_row("deepseek", {**EXPERT_FF, **DENSE_FIRST, "expert_shared_count": 2, "expert_weights_scale": 1.0,
     "attention.head_count_kv": N_HEAD}, drop=OPTIONAL_BIASES)  # fmt: skip
_row("deepseek scaled, one expert used", {**EXPERT_FF, "expert_used_count": 1, "expert_shared_count": 1,
     "expert_weights_scale": 2.5}, architecture="deepseek", drop=(OUTPUT,))  # fmt: skip
_DEEPSEEK2: dict[str, Any] = {
    **EXPERT_FF,
    **DENSE_FIRST,
    "rope.dimension_count": 8,
    "attention.kv_lora_rank": 32,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.5,
    **YARN,
    "rope.scaling.yarn_log_multiplier": 0.07,
}
_MLA: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
}
_row("deepseek2", {**_DEEPSEEK2, **_MLA, "attention.q_lora_rank": 32, "expert_gating_func": 2,
     "expert_weights_norm": True, "expert_group_count": 2, "expert_group_used_count": 1}, drop=OPTIONAL_BIASES)  # fmt: skip
_row("deepseek2 without MLA", {**_DEEPSEEK2, "attention.head_count_kv": N_HEAD, "attention.key_length": 24,
     "attention.value_length": 16, "attention.q_lora_rank": 32}, architecture="deepseek2",
     drop=(*OPTIONAL_BIASES, "exp_probs_b"))  # fmt: skip
_row("deepseek2 lite", {**_DEEPSEEK2, **_MLA, "block_count": 26, "feed_forward_length": 32,
     "expert_feed_forward_length": 32}, architecture="deepseek2", drop=(*OPTIONAL_BIASES, "exp_probs_b"))  # fmt: skip
_row("deepseek2 temperature, gate and up of experts apart", {**_DEEPSEEK2, **_MLA, "attention.q_lora_rank": 0,
     "attention.temperature_scale": 0.1, "attention.temperature_length": 10, "leading_dense_block_count": 3},
     architecture="deepseek2", drop=(*OPTIONAL_BIASES, OUTPUT, "exp_probs_b", "ffn_gate_up_exps"),
     added={f"blk.3.ffn_{part}_exps.weight": (4, 64, N_EMBD) for part in ("gate", "up")})  # fmt: skip
_row("deepseek2 q8_0", {**_DEEPSEEK2, **_MLA, "attention.q_lora_rank": 32, "attention.key_length_mla": 40,
     "rope.scaling.yarn_log_multiplier": 0.1, "rope.scaling.attn_factor": 1.3}, architecture="deepseek2",
     types={"weight": "Q8_0"})  # fmt: skip
_row("deepseek2 dense, temperature without MLA", {**_DEEPSEEK2, "attention.head_count_kv": N_HEAD,
     "attention.key_length": 24, "attention.value_length": 16, "attention.q_lora_rank": 0,
     "attention.temperature_scale": 0.1, "attention.temperature_length": 10, "leading_dense_block_count": 4,
     "expert_count": 0, "expert_used_count": 0, "rope.scaling.type": "linear"}, architecture="deepseek2")  # fmt: skip
_row("deepseek2 wide latents", {**_DEEPSEEK2, "block_count": 2, "rope.dimension_count": 64, "attention.kv_lora_rank": 64,
     "attention.head_count_kv": 1, "attention.key_length": 128, "attention.value_length": 64,
     "attention.key_length_mla": 80, "attention.value_length_mla": 32, "attention.q_lora_rank": 32},
     architecture="deepseek2")  # fmt: skip
_row("internlm2", drop=OPTIONAL_BIASES)
_row("internlm2 fused, biases", YARN, architecture="internlm2", fused_qkv=True,
     drop=(r"attn_output\.bias", FFN_BIASES))  # fmt: skip
_row("minicpm", {"embedding_scale": 3.0, "residual_scale": 0.7, "logit_scale": 2.0},
     drop=("rope_f", *OPTIONAL_BIASES))  # fmt: skip
_row("minicpm tied, scales by default, biases", architecture="minicpm", drop=(OUTPUT,))
_row("minicpm long factors", LONGROPE, architecture="minicpm", drop=OPTIONAL_BIASES)
_row("minicpm short factors", {**LONGROPE, **SHORT_ENOUGH}, architecture="minicpm", drop=OPTIONAL_BIASES)
_row("minicpm experts", EXPERTS, architecture="minicpm", drop=("rope_freqs", *OPTIONAL_BIASES))
_row("nemotron", {"rope.dimension_count": 8}, norm="layer", drop=OPTIONAL_BIASES)
_row("nemotron biases", {"rope.dimension_count": 12}, architecture="nemotron", norm="layer")
_row("arcee", drop=("rope_freqs", *OPTIONAL_BIASES))
_row("arcee tied, biases, frequency factors", architecture="arcee", drop=(OUTPUT, r"attn_output\.bias", FFN_BIASES))
_row("apertus", {"xielu.alpha_n": [0.8, 0.6, 0.7, 0.5], "xielu.alpha_p": [0.8, 0.9, 1.1, 0.7],
     "xielu.beta": [0.5, 0.4, 0.5, 0.6], "xielu.eps": [-1e-6] * 4}, drop=("rope_f", *OPTIONAL_BIASES),
     ignored=r"attn_[qk]_norm\.bias")  # fmt: skip
_row("apertus longrope, biases", {"xielu.alpha_n": 0.8, "xielu.alpha_p": 1.2, "xielu.beta": 0.6, "xielu.eps": -0.1,
     "rope.scaling.type": "longrope", "rope.scaling.original_context_length": BORDER}, architecture="apertus",
     fused_qkv=True, ignored=r"attn_[qk]_norm\.bias")  # fmt: skip
_LLAMA4: dict[str, Any] = {**EXPERT_FF, "interleave_moe_layer_step": 2}
_row("llama4", _LLAMA4, drop=("rope_freqs", *OPTIONAL_BIASES))
_row("llama4 tied, biases, factors, a base for chunks", {**_LLAMA4, "expert_used_count": 1, "block_count": 5,
     "interleave_moe_layer_step": 1, "rope.freq_base_swa": 500.0, "attention.sliding_window": 4096,
     "attention.sliding_window_pattern": [True, False, False, True, True]},
     architecture="llama4", drop=(OUTPUT, r"attn_output\.bias"))  # fmt: skip
_row("llama4 of 128 experts, dense, linear", {**_LLAMA4, "expert_count": 128, "expert_feed_forward_length": 32,
     "interleave_moe_layer_step": 3, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
     architecture="llama4", drop=("rope_freqs", *OPTIONAL_BIASES))  # fmt: skip
_row("bailingmoe", {**EXPERT_FF, "leading_dense_block_count": 0, "expert_shared_count": 1, "expert_weights_scale": 1.0,
     "expert_weights_norm": True, "rope.dimension_count": 16}, drop=OPTIONAL_BIASES)  # fmt: skip
_row("bailingmoe scaled, not normalised", {**EXPERT_FF, "leading_dense_block_count": 1, "expert_shared_count": 2,
     "expert_weights_scale": 2.5}, architecture="bailingmoe")  # fmt: skip
_row("dots1", {**EXPERT_FF, **DENSE_FIRST, "attention.head_count_kv": N_HEAD, "expert_shared_count": 1,
     "expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 2}, drop=OPTIONAL_BIASES)  # fmt: skip
_DOTS1: dict[str, Any] = {**EXPERT_FF, **DENSE_FIRST, "attention.head_count_kv": N_HEAD, "expert_shared_count": 1}
_row("dots1 groups, sigmoid, not normalised", {**_DOTS1, **GROUPS, "expert_gating_func": 2}, architecture="dots1")
_row("dots1 softmax of the chosen", {**_DOTS1, "expert_gating_func": 3, "expert_weights_scale": 0.0},
     architecture="dots1", drop=("exp_probs_b",))  # fmt: skip
_row("dots1 root of softplus", {**_DOTS1, "expert_gating_func": 4, "expert_weights_norm": True},
     architecture="dots1")  # fmt: skip
_row("muse-glimmer", {**WINDOWED, **HEADS_OF_32, "logit_scale": 0.5, "block_count": 5}, drop=OPTIONAL_BIASES)
_row("muse-glimmer yarn, fused", {**YARN, "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 2,
     "logit_scale": 1.5, "final_logit_softcapping": 0.0, "rope.freq_base_swa": 500.0, "rope.dimension_count": 8},
     architecture="muse-glimmer", fused_qkv=True)  # fmt: skip

# ---- recurrent and hybrid ones

_SSM: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16}
_NO_HEADS: dict[str, Any] = {
    "attention.head_count": None,
    "attention.head_count_kv": None,
    "rope.freq_base": None,
    "feed_forward_length": 0,
}
_row("mamba", {**_NO_HEADS, **_SSM, "ssm.time_step_rank": 8}, memory="recurrent")
_row("mamba2", {**_NO_HEADS, **_SSM, "ssm.time_step_rank": 8, "ssm.group_count": 2}, memory="recurrent")
_row("lfm2", {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3}, memory="hybrid", drop=OPTIONAL_BIASES)
_row("granitehybrid", {**_SCALED, **_SSM, "attention.head_count_kv": [0, 2, 0, 2], "ssm.time_step_rank": 8,
     "ssm.group_count": 2}, memory="hybrid", drop=OPTIONAL_BIASES)  # fmt: skip
_DELTA: dict[str, Any] = {
    **HEADS_OF_32,
    "full_attention_interval": 2,
    "rope.dimension_count": 16,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
_row("qwen3next", {**_DELTA, **EXPERT_FF, "expert_shared_feed_forward_length": 48}, memory="hybrid")
_row("qwen35", {**_DELTA, "rope.dimension_sections": [3, 3, 2, 0]}, memory="hybrid")
# heads of 16 are narrower than what the kernel takes at once: its tokens then see those that follow
# ggml's kernel takes 64 elements of a head at once where vectors have 512 bits, and reads past shorter heads
_row("rwkv7", {**_NO_HEADS, "feed_forward_length": N_FF, "wkv.head_size": 64, "attention.decay_lora_rank": 8,
     "attention.iclr_lora_rank": 8, "attention.value_residual_mix_lora_rank": 8, "attention.gate_lora_rank": 8},
     norm="layer", memory="recurrent")  # fmt: skip

# ---- encoders

_row("bert", {"attention.head_count_kv": N_HEAD, "attention.causal": False, "pooling_type": 1,
     "tokenizer.ggml.token_type_count": 2, "tokenizer.ggml.cls_token_id": 1,
     "tokenizer.ggml.seperator_token_id": 2, "tokenizer.ggml.mask_token_id": 3}, norm="layer", memory="none", tokenizer="bert",
     drop=(r"attn_[qk]_norm", r"^cls"))  # fmt: skip


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="architectures-")


@cache
def model_file(name: str) -> Path:
    """The file of a row, made once in a process and removed at its end."""
    return write_model(ROWS[name].model, Path(_folder().name) / f"{name}.gguf")
