"""What /tokenize writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialect_fakes import Bytes

from ggml_engine.server import tokens
from ggml_engine.server.tokens import Tokenize


@pytest.mark.parametrize("with_pieces", [False, True])
@pytest.mark.parametrize("n", [0, 1, 4096, 10_000])
def test_a_long_answer_is_written_a_part_at_a_time_and_is_whole(
    monkeypatch: pytest.MonkeyPatch, n: int, with_pieces: bool
) -> None:
    dumps, sizes = json.dumps, []

    def counted(value: Any) -> str:
        sizes.append(len(value))
        return dumps(value)

    monkeypatch.setattr(tokens.json, "dumps", counted)
    written = json.loads(tokens._written(Bytes(), Tokenize(content="a" * n, with_pieces=with_pieces)))
    assert written == {"tokens": [{"id": 97, "piece": "a"} if with_pieces else 97] * n}
    assert max(sizes, default=0) <= 4096
