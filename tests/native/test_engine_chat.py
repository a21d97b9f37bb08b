"""What an engine hands to its model's chat template."""

from __future__ import annotations

from pathlib import Path

from tiny_models import write_llama

from ggml_engine.engine import Engine

TEMPLATE = (
    "{{ messages[0].content }}{% for tool in tools %}|{{ tool.function.name }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}|quiet{% endif %}"
)


def test_variables_reach_the_chat_template(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "hello"}]
    tools = [{"type": "function", "function": {"name": "now"}}]
    with Engine.load(path, threads=1, device="cpu", ctx=64) as engine:
        for text, variables in (("hello", {}), ("hello|now|quiet", {"tools": tools, "enable_thinking": False})):
            expected = engine.vocabulary.encode(text, add_special=True, parse_special=False).tolist()
            assert engine.encode_chat(messages, **variables) == expected
