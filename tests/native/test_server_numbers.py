"""A model whose numbers are broken, served over HTTP: what meets them fails and says so; all else goes on.

Rows of its table of embeddings are NaN or infinite: a prompt with such a token has logits that are no numbers, and so
has whatever follows the token once it was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from live_server import LiveServer, live_server
from tiny_models import VOCAB, write_llama

from ggml_engine.ggml.gguf import GGUFFile

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
BROKEN = {"q": np.nan, "z": np.inf}  # letters whose tokens have no place among numbers
FINE = "the rain in the night"
DIALECTS: dict[str, Any] = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 4},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 4},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
}


def token_of(letter: str) -> int:
    """Of a letter inside a word: after specials, bytes and the space."""
    return 3 + 256 + 1 + ord(letter) - ord("a")


HEALTHY = {
    "temperature": 0, "max_tokens": 6, "ignore_eos": True, "logit_bias": {str(token_of(letter)): -100 for letter in BROKEN}
}  # fmt: skip


def broken_model(path: Path) -> Path:
    """A model with these rows."""
    write_llama(path, chat_template=TEMPLATE, context_length=256)
    with GGUFFile.open(path, mmap=False) as file:
        info = file.tensors["token_embd.weight"]
        start, n_bytes = info.offset, info.n_bytes // VOCAB
    with path.open("r+b") as out:
        for letter, value in BROKEN.items():
            out.seek(start + token_of(letter) * n_bytes)
            out.write(np.full(n_bytes // 4, value, "<f4").tobytes())
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return broken_model(tmp_path_factory.mktemp("broken") / "broken.gguf")


@pytest.fixture(scope="module", params=["cells", "flash"])
def server(request: pytest.FixtureRequest, path: Path) -> Iterator[LiveServer]:
    """In the forms that read no row which is masked."""
    with live_server(models=[f"m={path}"], ctx=1024, threads=1, attention=request.param) as found:
        yield found


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


def completed(client: httpx.Client, prompt: str = FINE, **more: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": prompt, **HEALTHY, **more})


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def assert_at_rest(server: LiveServer) -> None:
    """Nothing runs or waits, and no lane is kept."""
    (model,) = server.host.loaded()
    stats = model.runtime.stats()
    assert [stats[name] for name in ("running", "waiting", "lanes_in_use")] == [0, 0, 0]


@pytest.mark.parametrize("letter", BROKEN)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_request_whose_logits_are_no_numbers_fails_in_the_form_of_its_dialect(
    server: LiveServer, client: httpx.Client, dialect: str, letter: str
) -> None:
    answer = client.post(dialect, json=DIALECTS[dialect](f"the {letter}"))
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert "non-finite logits" in error["message"]
    if dialect == "/v1/messages":
        assert (answer.json()["type"], error["type"]) == ("error", "api_error")
    else:
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
    assert client.get("/health").status_code == 200
    assert_at_rest(server)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_of_it_ends_with_an_error_and_no_stop(client: httpx.Client, dialect: str) -> None:
    with client.stream("POST", dialect, json={**DIALECTS[dialect]("the q"), "stream": True}) as answer:
        text = "".join(answer.iter_text())
    if answer.status_code == 200:
        *_, last = [part for part in text.split("\n\n") if part and "[DONE]" not in part]
        assert "non-finite logits" in last
        assert "error" in last
        assert text.endswith("data: [DONE]\n\n") == (dialect in ("/v1/completions", "/v1/chat/completions"))
        assert not any(end in text for end in ('"stop"', "end_turn", "response.completed", "message_stop"))
    else:
        assert answer.status_code == 500
        assert "non-finite logits" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_meets_them_midway_is_no_answer(client: httpx.Client, is_streamed: bool) -> None:
    """The first token is one after which nothing is a number."""
    body = {"prompt": FINE, "max_tokens": 8, "temperature": 0, "logit_bias": {str(token_of("q")): 100}}
    answer = client.post("/v1/completions", json={**body, "stream": is_streamed})
    if not is_streamed:
        assert answer.status_code == 500
        assert "non-finite logits" in answer.json()["error"]["message"]
        return
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    assert "non-finite logits" in json.loads(events[-1])["error"]["message"]
    said = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in said) == "q"
    assert {choice["finish_reason"] for choice in said} == {None}


def test_what_others_are_told_beside_it_and_after_it_is_what_they_are_told_alone(
    server: LiveServer, client: httpx.Client
) -> None:
    """Rows of K and V that are no numbers lie in the pool meanwhile, and stay there when their owner is gone."""
    alone = text_of(completed(client))
    with client.stream("POST", "/v1/completions", json={"prompt": "a long way", **HEALTHY, "max_tokens": 120,
                                                          "session_id": "long", "stream": True}) as stream:  # fmt: skip
        events = stream.iter_text()
        next(events)
        for turn in range(6):
            assert completed(client, f"the {'qz'[turn % 2]} {turn}", n=2).status_code == 500
            assert text_of(completed(client)) == alone
        rest = "".join(events)
    assert '"length"' in rest
    assert "error" not in rest
    for turn in range(6):  # new cells, where the broken ones were
        assert text_of(completed(client, session_id=f"s{turn}")) == alone
    assert_at_rest(server)


def test_a_session_that_met_them_is_begun_anew_by_its_next_request(client: httpx.Client) -> None:
    alone = text_of(completed(client))
    assert text_of(completed(client, session_id="mine")) == alone
    assert completed(client, f"{FINE}q", session_id="mine").status_code == 500
    assert text_of(completed(client, session_id="mine")) == alone


def test_where_masked_rows_are_read_it_fails_as_well_and_the_server_lives(path: Path) -> None:
    """There others that read the same blocks of rows may fail with it: with an error, never with an answer."""
    options: dict[str, Any] = {"ctx": 1024, "threads": 1, "attention": "matmul"}
    with (
        live_server(models=[f"m={path}"], **options) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        alone = text_of(completed(client))
        assert completed(client, "the q").status_code == 500
        for _ in range(4):
            after = completed(client)
            assert text_of(after) == alone if after.status_code == 200 else "non-finite logits" in after.text
        assert client.get("/health").status_code == 200
        assert_at_rest(server)
