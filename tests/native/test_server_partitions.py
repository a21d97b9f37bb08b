"""Keys over HTTP and a real engine: what one key's prompts left is not there for another's; and what may be saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from tiny_models import write_llama

from ggml_engine.server.sessions import saved_bytes

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
KEYS = {"a": "sk-of-a", "b": "sk-of-b"}
DIALECTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "m.gguf", chat_template=TEMPLATE)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the variable that has both."""
    monkeypatch.setenv("KEYS_OF_TEST", " ".join(KEYS.values()))
    return "KEYS_OF_TEST"


@pytest.fixture
def server(model: Path, keys: str) -> Iterator[LiveServer]:
    with live_server(models=[f"m={model}"], ctx=2048, threads=1, api_key_env=keys) as found:
        yield found


def client_of(server: LiveServer, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {KEYS[key]}"})


def body_of(path: str, text: str, **more: Any) -> dict[str, Any]:
    """A request of one token."""
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    said: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    said = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}}.get(path, said)
    return {**said, most: 1, **more}


def counts(path: str, answer: httpx.Response) -> tuple[int, int]:
    """Tokens of a prompt, and how many of them were cached."""
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    of, details = ("input", "input_tokens_details") if path == "/v1/responses" else ("prompt", "prompt_tokens_details")
    return usage[f"{of}_tokens"], usage[details]["cached_tokens"]


@pytest.mark.parametrize("path", DIALECTS)
def test_a_prompt_of_one_key_is_not_cached_for_another(server: LiveServer, path: str) -> None:
    body = body_of(path, "the night and the rain in the end")
    with client_of(server, "a") as a, client_of(server, "b") as b:
        n, first = counts(path, a.post(path, json=body))
        assert (n > 20, first) == (True, 0)
        assert counts(path, b.post(path, json=body)) == (n, 0)
        assert counts(path, a.post(path, json=body)) == (n, n - 1)
        assert counts(path, b.post(path, json=body)) == (n, n - 1)


def test_what_one_dialect_read_is_cached_for_the_others_of_its_key_alone(server: LiveServer) -> None:
    text = "a tale that all of them tell "
    with client_of(server, "a") as a, client_of(server, "b") as b:
        n, _ = counts(DIALECTS[0], a.post(DIALECTS[0], json=body_of(DIALECTS[0], text)))
        for path in DIALECTS[1:]:
            assert counts(path, a.post(path, json=body_of(path, text.strip())))[1] >= n - 2, path
        assert counts(DIALECTS[0], b.post(DIALECTS[0], json=body_of(DIALECTS[0], text))) == (n, 0)


def test_a_session_of_one_key_is_not_gone_on_with_by_another(server: LiveServer) -> None:
    path, text = DIALECTS[0], "once there was a thing"
    with client_of(server, "a") as a, client_of(server, "b") as b:
        counts(path, a.post(path, json=body_of(path, text, session_id="mine")))
        assert counts(path, b.post(path, json=body_of(path, text, session_id="mine")))[1] == 0
        for client in (a, b):
            (listed,) = client.get("/v1/sessions").json()["data"]
            assert listed["id"] == "mine"
        assert a.delete("/v1/sessions/mine").status_code == 200
        assert a.get("/v1/sessions").json()["data"] == []
        assert len(b.get("/v1/sessions").json()["data"]) == 1


def test_what_is_saved_stays_within_the_quota_of_all_keys_together(model: Path, keys: str, tmp_path: Path) -> None:
    """Two of three sessions fit; the third one does when one of them is gone, whichever key it is of."""
    text = "the rain and the night in the rain " * 8
    options: dict[str, Any] = {"ctx": 2048, "threads": 1, "api_key_env": keys, "session_directory": str(tmp_path)}

    def begin(client: httpx.Client, name: str) -> int:
        body = body_of(DIALECTS[0], text, session_id=name)
        counts(DIALECTS[0], client.post(DIALECTS[0], json=body))
        (position,) = (each["position"] for each in client.get("/v1/sessions").json()["data"] if each["id"] == name)
        return int(position)

    def save(client: httpx.Client, name: str) -> httpx.Response:
        return client.post(f"/v1/sessions/{name}/save", json={})

    with live_server(models=[f"m={model}"], **options) as server, client_of(server, "a") as a:
        begin(a, "one")
        assert save(a, "one").status_code == 200
        of_one = saved_bytes(tmp_path)
        assert of_one > 10_000
        quota = 2 * of_one + (1 << 16)  # what a file may need beside its K/V
    with (
        live_server(models=[f"m={model}"], session_quota=quota, **options) as server,
        client_of(server, "a") as a,
        client_of(server, "b") as b,
    ):
        assert a.post("/v1/sessions/one/load", json={}).json()["position"] > 100  # what was saved before counts, too
        positions = [begin(a, "two"), begin(b, "three"), begin(b, "four")]
        assert len(set(positions)) == 1
        assert save(b, "three").status_code == 200
        for client, name in ((a, "two"), (b, "four")):
            refused = save(client, name)
            assert refused.status_code == 507
            assert refused.json()["error"]["code"] == "session_quota"
            assert "session_quota" in refused.json()["error"]["message"]
        assert saved_bytes(tmp_path) <= quota
        assert (a.get("/v1/sessions").json()["saved"], b.get("/v1/sessions").json()["saved"]) == (["one"], ["three"])
        assert b.post("/v1/sessions/one/load", json={}).status_code == 404
        assert save(b, "three").status_code == 200  # in its own place
        assert a.delete("/v1/sessions/one?saved=true").status_code == 200
        assert save(b, "four").status_code == 200
        assert saved_bytes(tmp_path) <= quota
        for name in ("three", "four"):
            assert b.delete(f"/v1/sessions/{name}").status_code == 200
            assert b.post(f"/v1/sessions/{name}/load", json={}).json()["position"] == positions[0]
            n, cached = counts(DIALECTS[0], b.post(DIALECTS[0], json=body_of(DIALECTS[0], text, session_id=name)))
            assert cached == n - 1
