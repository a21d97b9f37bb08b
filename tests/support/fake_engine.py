"""An engine without a model, for tests of the command line: it records what it was asked and speaks given pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from ggml_engine.control.generation import Prefill, Update
from ggml_engine.errors import ChatTemplateError


class FakeGeneration:
    """Gives `pieces`; a callable among them is called instead of shown, for things that happen meanwhile."""

    def __init__(self, pieces: list[str | Callable[[], Any]], prompt_tokens: int) -> None:
        self.pieces = pieces
        self.text = ""
        self.tokens: list[int] = []
        self.reason: Any = None
        self.cancelled = False
        self.stats = SimpleNamespace(
            prompt_tokens=prompt_tokens, reused_tokens=2, evaluated_tokens=prompt_tokens - 2, generated_tokens=0,
            first_token_s=None, prefill_s=0.5, decode_s=0.25, prefill_tokens_per_s=10.0, decode_tokens_per_s=20.0,
        )  # fmt: skip

    def cancel(self) -> None:
        self.cancelled = True

    def updates(self) -> Iterator[Update]:
        n = self.stats.evaluated_tokens
        yield Update(prefill=Prefill(n, n, 10.0))
        for number, piece in enumerate(self.pieces):
            if self.cancelled:
                break
            if callable(piece):
                piece()
                continue
            self.text += piece
            self.tokens.append(number)
            self.stats.generated_tokens += 1
            self.stats.first_token_s = 0.125
            yield Update((number,), piece)
        self.reason = SimpleNamespace(value="cancelled" if self.cancelled else "finished")


class FakeEngine:
    """Has what the command line uses of `Engine`. `asked` are the calls, in order."""

    def __init__(self, pieces: list[Any] | None = None, *, has_template: bool = True, prompt_tokens: int = 7) -> None:
        self.pieces = ["Hello", " there"] if pieces is None else pieces
        self.has_template = has_template
        self.prompt_tokens = prompt_tokens
        self.asked: list[tuple[str, Any]] = []
        self.config: Any = None
        self.load_options: dict[str, Any] = {}
        self.closed = False
        self.kind, self.reason = "native", "there is a graph for 'llama' models"
        self.file = SimpleNamespace(
            path="fake.gguf", metadata={"general.name": "Fake", "general.architecture": "llama"}
        )
        cells = {
            "cells_used": 0,
            "cells_peak": 9,
            "cells_capacity": 64,
            "kv_bytes": 3 << 20,
            "kv_capacity_bytes": 12 << 20,
        }
        self.executor = SimpleNamespace(stats=lambda: cells, options=SimpleNamespace(max_batch_tokens=512))

    def load(self, model: str, **options: Any) -> FakeEngine:
        """Stands for `Engine.load`."""
        self.asked.append(("load", model))
        self.load_options = options
        options["progress"](50, 100)
        return self

    @property
    def template(self) -> Any:
        if not self.has_template:
            raise ChatTemplateError("fake.gguf has no chat template")
        return SimpleNamespace(check=lambda: None)

    def _generation(self, config: Any) -> FakeGeneration:
        self.config = config
        return FakeGeneration(self.pieces, self.prompt_tokens)

    def generate(self, prompt: str, config: Any, *, parse_special: bool) -> FakeGeneration:
        self.asked.append(("generate", (prompt, parse_special)))
        return self._generation(config)

    def chat(self, messages: list[dict[str, str]], config: Any) -> FakeGeneration:
        self.asked.append(("chat", messages))
        return self._generation(config)

    def conversation(self, system: str | None) -> Any:
        self.asked.append(("conversation", system))

        def send(text: str, config: Any) -> FakeGeneration:
            self.asked.append(("send", text))
            return self._generation(config)

        return SimpleNamespace(send=send)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.closed = True
