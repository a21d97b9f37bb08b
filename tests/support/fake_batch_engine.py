"""An engine for `ggml-engine batch` without a model: a real runner over the fake executor, and texts as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_executor import WAIT_S, FakeExecutor
from fake_text import FakeText

from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.runner import Runner
from ggml_engine.errors import ChatTemplateError

N_VOCAB = 97


def tokens_of(text: str) -> list[int]:
    """A token for each character."""
    return [ord(letter) % N_VOCAB for letter in text]


class FakeBatchEngine:
    """Has what the batch command uses of `Engine`; `asked` are the chats and texts that it encoded."""

    def __init__(self, *, has_template: bool = True, **executor_options: Any) -> None:
        self.fake = FakeExecutor(**executor_options)
        self.text = FakeText()
        self.has_template = has_template
        self.asked: list[Any] = []
        self.load_options: dict[str, Any] = {}
        self.runner_options: RunnerOptions | None = None
        self.is_loaded = False
        self.closed = False
        self.kind, self.reason = "native", "there is a graph for 'llama' models"
        self.made: Runner | None = None
        self.vocabulary = SimpleNamespace(encode=self._encode)

    def load(self, model: str, **options: Any) -> FakeBatchEngine:
        """Stands for `Engine.load`."""
        self.is_loaded = True
        self.load_options = options
        return self

    def runner(self, options: RunnerOptions) -> Runner:
        self.runner_options = options
        self.made = Runner(self.fake, self.text, options)
        return self.made

    @property
    def template(self) -> Any:
        if not self.has_template:
            raise ChatTemplateError("fake.gguf has no chat template")
        return SimpleNamespace(check=lambda: None)

    def _encode(self, text: str, *, add_special: bool, parse_special: bool) -> Any:
        assert add_special
        self.asked.append((text, parse_special))
        return np.array(tokens_of(text), np.int32)

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        self.asked.append(list(messages))
        if messages[-1]["role"] == "martian":
            raise ChatTemplateError("the template refuses the role martian")
        return tokens_of("".join(f"{message['role'][0]}{message['content']}" for message in messages))

    def answer(self, prompt: str, n: int) -> str:
        """The greedy answer to a prompt of a user."""
        return self.text.shown(self.fake.expected(tokens_of(f"u{prompt}"), n))

    def __enter__(self) -> FakeBatchEngine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.closed = True
        if self.made is not None:
            assert self.made.shutdown(WAIT_S)
            self.fake.check_balance()
