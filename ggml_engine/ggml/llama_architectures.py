"""What libllama knows by name: values of `general.architecture` and what kind of model each is. Data alone.

As of the libllama in llama-cpp-python 0.3.36: llama.cpp's src/llama-arch.cpp (names; which are recurrent, hybrid or
diffusion models), llama-model.cpp (which it can build, their memory, which have an encoder) and src/models/.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ggml_engine.ggml.gguf import GGUFFile

__all__ = ["LLAMA_ARCHITECTURES", "Kind", "is_encoder"]


class Kind(Enum):
    """What kind of model an architecture is: what it keeps of a text, or why it generates none by itself."""

    ATTENTION = "decoder with attention"
    HYBRID = "decoder with attention and a recurrent state"
    RECURRENT = "decoder with a recurrent state"
    DIFFUSION = "diffusion model"
    ENCODER = "encoder"
    ENCODER_DECODER = "encoder and decoder"
    DRAFT = "draft for another model"
    SPEECH = "speech model"
    VISION = "vision model"
    NAME_ONLY = "name without a model"

    @property
    def is_decoder(self) -> bool:
        """Whether it generates text token by token, and needs no other model for it: what libllama's context runs."""
        return self in {Kind.ATTENTION, Kind.HYBRID, Kind.RECURRENT}


_NAMES: Final = {
    Kind.ATTENTION: """
        afmoe apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell cogvlm
        cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 dots1 dots3note ernie4_5
        ernie4_5-moe exaone exaone-moe exaone4 falcon gemma gemma2 gemma3 gemma3n gemma4 glm-dsa glm4 glm4moe gpt-oss
        gpt2 gptneox granite granite_swa granitemoe graniteswitch grok grovemoe hrm_text hunyuan-dense hunyuan-moe
        hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 laguna llama llama4 maincoder maple mellum mimo2 minicpm minicpm3
        minimax-m2 minimax-m3 mistral3 mistral4 mpt muse-glimmer nanbeige nemotron olmo olmo2 olmoe openelm orion
        paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo3 plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl
        qwen3vlmoe refact seed_oss smallthinker smollm3 spark2_5 stablelm starcoder starcoder2 step35 talkie xverse
        """,
    Kind.HYBRID: """
        bailingmoe3 deepseek4 falcon-h1 glm5-next granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe minimax-01
        nemotron_h nemotron_h_moe plamo2 qwen35 qwen35moe qwen3next qwen4exp
        """,
    Kind.RECURRENT: "arwkv7 mamba mamba2 rwkv6 rwkv6qwen2 rwkv7",
    Kind.DIFFUSION: "dream llada llada-moe rnd1",
    Kind.ENCODER: """
        bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert
        nomic-bert-moe t5encoder
        """,
    Kind.ENCODER_DECODER: "t5",
    Kind.DRAFT: "dflash eagle3 gemma4-assistant",
    Kind.SPEECH: "pockettts qwen3tts wavtokenizer-dec",
    Kind.VISION: "clip",
    Kind.NAME_ONLY: "gptj",
}

LLAMA_ARCHITECTURES: Final = dict(sorted((name, kind) for kind, names in _NAMES.items() for name in names.split()))
"""The kind of every architecture by its name, in the order of names."""


def is_encoder(file: GGUFFile) -> bool:
    """Whether the file holds a model that embeds texts and generates none."""
    return LLAMA_ARCHITECTURES.get(str(file.metadata.get("general.architecture"))) is Kind.ENCODER
