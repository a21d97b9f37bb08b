"""The server over a real model and a real socket: tokens, embeddings, metrics, sessions of nobody, and its end."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from server_fakes import WAIT_S, wait_for

from ggml_engine import Engine
from ggml_engine.server.options import resolve
from ggml_engine.server.run import Server


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    server = Server(resolve({"models": ["smollm2"], "port": 0, "ctx": 1024}))
    thread = threading.Thread(target=server.serve_until_told)
    thread.start()
    with httpx.Client(base_url=server.url, timeout=60) as found:
        wait_for(lambda: server.started, "the server listens")
        wait_for(lambda: found.get("/health").status_code == 200, "the model is loaded")
        yield found
    server.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert server.is_whole


def test_tokens_come_and_go(client: httpx.Client) -> None:
    text = "<|im_start|>user\nHéllo 🦙<|im_end|>"
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    plain = client.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
    assert len(plain) > len(tokens)
    pieces = client.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    joined = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in (piece["piece"] for piece in pieces))
    assert joined.decode() == text


@pytest.mark.parametrize("tokens", [[-1], [10**9], [2**63], [True], [1.5], ["1"], "x", [[1]]], ids=str)
def test_what_are_no_tokens_is_a_400(client: httpx.Client, tokens: object) -> None:
    assert client.post("/detokenize", json={"tokens": tokens}).status_code == 400
    body = {"model": "smollm2", "input": tokens}
    if tokens not in ("x", ["1"], [[1]]):
        assert client.post("/v1/embeddings", json=body).status_code == 400


def test_embeddings_are_the_engines_in_both_encodings(client: httpx.Client) -> None:
    texts = ["The cat purrs.", "The bank raised its rates."]
    answers = [
        client.post("/v1/embeddings", json={"model": "smollm2", "input": texts, "encoding_format": form}).json()
        for form in ("float", "base64")
    ]
    plain = np.array([row["embedding"] for row in answers[0]["data"]], np.float32)
    coded = np.array([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in answers[1]["data"]])
    with Engine.load("smollm2", ctx=1024) as engine:
        expected = engine.embed(texts)
        n_tokens = sum(engine.vocabulary.encode(t, add_special=True, parse_special=False).size for t in texts)
    np.testing.assert_allclose(plain, expected, atol=1e-5)  # texts share steps otherwise than alone
    np.testing.assert_allclose(coded, plain, atol=1e-6)
    assert answers[0]["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}


def test_embeddings_take_texts_beside_tokens_and_the_first_model_where_none_is_named(client: httpx.Client) -> None:
    text = "The cat purrs."
    tokens = client.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
    answer = client.post("/v1/embeddings", json={"input": [text, tokens]}).json()
    assert answer["model"] == "smollm2"
    named, counted = (row["embedding"] for row in answer["data"])
    np.testing.assert_allclose(named, counted, atol=1e-5)


def test_dimensions_and_unknown_fields_are_unsupported(client: httpx.Client) -> None:
    for field in ("dimensions", "other"):
        answer = client.post("/v1/embeddings", json={"model": "smollm2", "input": "x", field: 5})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_parameter"
        assert answer.json()["error"]["param"] == field


def test_a_text_over_the_context_is_a_400_with_both_counts(client: httpx.Client) -> None:
    error = client.post("/v1/embeddings", json={"model": "smollm2", "input": "word " * 3000}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"]


def test_metrics_tell_cells_and_requests(client: httpx.Client) -> None:
    client.get("/health")
    text = client.get("/metrics").text
    assert 'ggml_engine_cells{model="smollm2"} 1024.0' in text
    assert 'ggml_engine_snapshots{model="smollm2"} 0.0' in text
    assert 'ggml_engine_requests_total{method="GET",route="/health",status="200"}' in text


def test_a_session_that_there_is_not_is_a_404_and_one_that_cannot_be_saved_a_400(client: httpx.Client) -> None:
    assert client.get("/v1/sessions").json() == {"object": "list", "data": [], "saved": []}
    assert client.post("/v1/sessions/nobody/rewind", json={"to": 1}).status_code == 404
    assert client.post("/v1/sessions/nobody/fork", json={"name": "b"}).status_code == 404
    assert client.delete("/v1/sessions/nobody").status_code == 404
    assert client.post("/v1/sessions/nobody/save", json={}).json()["error"]["code"] == "no_session_directory"
    assert client.post("/v1/sessions/.hidden/save", json={}).status_code == 400
