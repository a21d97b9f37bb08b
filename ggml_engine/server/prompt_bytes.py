"""`check_bytes`: a text that no context can hold is refused by its bytes, before seconds go into tokenising it.

What only counts tokens (`/tokenize`, `/v1/messages/count_tokens`) does not ask: how long a text is in tokens is what
its callers want to know, also of one that is too long, and no session bounds it.
"""

from __future__ import annotations

from ggml_engine.ggml.token_bytes import TokenBytes, token_bytes
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.hosted_model import HostedModel


def check_bytes(model: HostedModel, text: str, n_tokens: int, what: str = "the prompt") -> None:
    """Raise HttpProblem 400 for a text that has certainly more than `n_tokens` tokens of a model. Not for the loop."""
    if 4 * len(text) <= n_tokens:  # UTF-8 has at most 4 bytes a character, a token at least one
        return
    known: TokenBytes | None = model.fact(
        "token_bytes", lambda: token_bytes(model.engine.file, model.engine.vocabulary)
    )
    if known is None:
        return
    n_bytes, most = known.count(text), n_tokens * known.longest
    if n_bytes > most:
        raise HttpProblem(
            400,
            "context_length_exceeded",
            f"{what} has {n_bytes} bytes, the {n_tokens} tokens that the context holds stand for at most {most}",
            details={"n_prompt_bytes": n_bytes, "max_prompt_bytes": most, "n_ctx": n_tokens},
        )
