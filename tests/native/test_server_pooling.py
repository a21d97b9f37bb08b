"""Embeddings over HTTP of models whose files say how hidden states become one, and of those that say they do not."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from live_server import live_server
from tiny_models import write_llama


@pytest.mark.parametrize(
    ("pooling_type", "is_given"), [(None, True), (1, True), (3, True), (0, False), (4, False), (77, False)], ids=str
)
def test_an_embedding_is_one_vector_or_refused(tmp_path: Path, pooling_type: int | None, is_given: bool) -> None:
    metadata = {} if pooling_type is None else {"llama.pooling_type": pooling_type}
    path = write_llama(tmp_path / "tiny.gguf", metadata=metadata)
    with live_server(models=[f"m={path}"], ctx=64, threads=1) as server, httpx.Client(base_url=server.url) as client:
        for encoding in ("float", "base64"):
            sent = {"model": "m", "input": "the rain", "encoding_format": encoding}
            response = client.post("/v1/embeddings", json=sent, timeout=60)
            if is_given:
                assert response.status_code == 200
                (row,) = response.json()["data"]
                assert encoding == "base64" or all(isinstance(value, float) for value in row["embedding"])
            else:
                error = response.json()["error"]
                assert (response.status_code, error["code"], error["param"]) == (400, "no_embeddings", "model")
                assert str(tmp_path) not in response.text
        assert client.get("/health").status_code == 200
