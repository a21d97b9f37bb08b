"""What stands before every endpoint: Host, key, content type, body, ids, logs, and the shape of every refusal."""

from __future__ import annotations

import hmac
import logging
from typing import Any

import httpx
import pytest
from server_fakes import FakeLoader, Jobs, app_of, client_of, options_of, run
from starlette.applications import Starlette
from starlette.routing import Route

from ggml_engine.errors import (
    ChatTemplateError,
    ContextLengthError,
    EngineError,
    InputError,
    OptionError,
    PoolFullError,
    QueueFullError,
    SavedStateError,
    SessionBusyError,
    UnknownSessionError,
)
from ggml_engine.server import keys as keys_module
from ggml_engine.server.app import create_app
from ggml_engine.server.errors import HttpProblem, problem_of
from ggml_engine.server.guard import OPEN_PATHS
from ggml_engine.server.hosts import HostRule, is_loopback
from ggml_engine.server.keys import ApiKeys, load_keys

KEY, OTHER_KEY = "sk-first-key", "sk-other-key"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_ENGINE_API_KEY", f"{KEY} {OTHER_KEY}")


def asked(app: Starlette, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    """The responses to some requests, one after the other."""

    async def ask() -> list[httpx.Response]:
        async with client_of(app) as client:
            return [await client.request(method, path, **options) for method, path, options in requests]

    return run(ask())


def code_of(response: httpx.Response) -> str:
    return response.json()["error"]["code"]


def all_routes() -> list[tuple[str, str]]:
    """Every method and path of the application as it is served."""
    app = create_app(options_of(), loader=FakeLoader())
    found = []
    for route in app.routes:
        assert isinstance(route, Route), "a mounted application is not guarded by this list"
        path = route.path.replace("{name:path}", "m").replace("{name}", "x")
        found += [(method, path) for method in sorted(route.methods or ())]
    return found


class TestKeys:
    @pytest.mark.usefixtures("with_keys")
    @pytest.mark.parametrize(("method", "path"), all_routes())
    def test_every_route_but_health_needs_the_key(self, method: str, path: str) -> None:
        wrong = {"Authorization": f"Bearer {KEY}x"}
        without, with_wrong = asked(
            app_of(), (method, path, {"json": {}}), (method, path, {"json": {}, "headers": wrong})
        )
        expected = 200 if path in OPEN_PATHS else 401
        assert (without.status_code, with_wrong.status_code) == (expected, expected)

    @pytest.mark.usefixtures("with_keys")
    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "TRACE", "BREW"])
    @pytest.mark.parametrize(
        "path", ["//v1/models", "/v1%2fmodels", "/V1/models", "/v1/models/", "/", "/health/", "/health/../v1/models",
                 "/%68ealth", "/health%2f..%2fmetrics", "/docs", "/openapi.json", "/health;x", "/metrics",
                 "/models/", "//models", "/Models", "/chat/completions/", "//chat/completions", "/chat%2fcompletions"]
    )  # fmt: skip
    def test_another_spelling_opens_nothing(self, method: str, path: str) -> None:
        (response,) = asked(app_of(), (method, path, {"json": {}}))
        assert response.status_code == 401

    @pytest.mark.usefixtures("with_keys")
    @pytest.mark.parametrize(
        "headers",
        [BEARER, {"authorization": f"bearer  {OTHER_KEY} "}, {"x-api-key": KEY}, {"x-api-key": OTHER_KEY}],
        ids=str,
    )
    def test_a_key_opens_in_the_forms_of_both_dialects(self, headers: dict[str, str]) -> None:
        (response,) = asked(app_of(), ("GET", "/v1/models", {"headers": headers}))
        assert response.status_code == 200

    @pytest.mark.usefixtures("with_keys")
    @pytest.mark.parametrize(
        "key", ["", KEY[:-1], KEY + "x", KEY.upper(), f"{KEY} {OTHER_KEY}", KEY + "\u00e9", "None"]
    )
    def test_what_is_not_the_whole_key_opens_nothing(self, key: str) -> None:
        for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}, {"Authorization": f"Basic {KEY}"}):
            encoded = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
            (response,) = asked(app_of(), ("GET", "/v1/models", {"headers": encoded}))
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"

    def test_a_key_is_compared_with_all_digests_whichever_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compared: list[tuple[bytes, bytes]] = []
        original = hmac.compare_digest

        def compare(a: bytes, b: bytes) -> bool:
            compared.append((a, b))
            return original(a, b)

        monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
        keys = ApiKeys(["one", "two", "three"])
        partitions = []
        for key in (b"one", b"two", b"three", b"on", b"\xff\xfe"):
            compared.clear()
            partitions.append(keys.partition_of(key))
            assert len(compared) == 3
            assert all(len(part) == 32 for pair in compared for part in pair)  # digests, never keys
        assert len({*partitions[:3]}) == 3
        assert partitions[3:] == [None, None]

    def test_each_key_has_its_own_partition(self, with_keys: None) -> None:
        jobs = Jobs()
        first, second, again = asked(
            app_of(jobs),
            *(("POST", "/echo", {"json": {}, "headers": {"x-api-key": key}}) for key in (KEY, OTHER_KEY, KEY)),
        )
        names = [response.json()["partition"] for response in (first, second, again)]
        assert names[0] == names[2] != names[1]
        assert not any(key in name for key in (KEY, OTHER_KEY) for name in names)

    def test_keys_come_from_lines_of_a_file(self, tmp_path: Any) -> None:
        file = tmp_path / "keys"
        file.write_text("# whose\nalpha\n\n  beta \n", encoding="utf-8")
        keys = load_keys("GGML_ENGINE_API_KEY", file, {})
        assert len(keys) == 2
        assert keys.partition_of(b"beta") is not None

    @pytest.mark.parametrize(
        ("name", "text", "environment", "reason"),
        [
            ("GGML_ENGINE_API_KEY", None, {"GGML_ENGINE_API_KEY": " "}, "GGML_ENGINE_API_KEY has no key"),
            ("MY_KEY", None, {}, "MY_KEY has no key"),
            (None, "\n# none\n", {}, "has no key in it"),
            (None, "a b", {}, "with a space"),
        ],
    )
    def test_a_source_without_a_key_refuses_to_start(
        self, name: str | None, text: str | None, environment: dict[str, str], reason: str, tmp_path: Any
    ) -> None:
        file = tmp_path / "keys"
        file.write_text(text or "", encoding="utf-8")
        with pytest.raises(OptionError, match=reason):
            load_keys(name, None if text is None else file, environment)

    def test_no_option_takes_a_key(self) -> None:
        from ggml_engine.cli.serve import serve

        spelled = {spelling for param in serve.params for spelling in param.opts if "key" in spelling}
        assert spelled == {"--api-key-env", "--api-key-file", "--public-without-key"}

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
    def test_a_public_address_without_a_key_is_refused_unless_it_is_meant(self, host: str) -> None:
        with pytest.raises(OptionError, match="api_key_file"):
            app_of(host=host)
        assert app_of(host=host, public_without_key=True)

    @pytest.mark.usefixtures("with_keys")
    def test_a_public_address_with_a_key_is_fine(self) -> None:
        assert app_of(host="0.0.0.0")

    def test_a_websocket_is_refused(self) -> None:
        sent: list[Any] = []

        async def ask() -> None:
            async def receive() -> Any:
                return {"type": "websocket.connect"}

            async def send(message: Any) -> None:
                sent.append(message)

            await app_of()({"type": "websocket", "path": "/health", "headers": []}, receive, send)

        run(ask())
        assert [message["type"] for message in sent] == ["websocket.close"]


class TestHosts:
    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:99"])
    def test_names_of_loopback_are_answered(self, host: str) -> None:
        (response,) = asked(app_of(), ("GET", "/v1/models", {"headers": {"Host": host}}))
        assert response.status_code == 200

    @pytest.mark.parametrize(
        "host",
        ["evil.example", "evil.example:8080", "localhost.evil.example", "evil.example#localhost", "127.0.0.1.nip.io",
         "localhost@evil.example", "", " ", "localhost:80:80", "localhost:", "127.0.0.2", "0.0.0.0", "[::1", "a b"],
    )  # fmt: skip
    @pytest.mark.parametrize("path", ["/v1/models", "/health", "/nowhere"])
    def test_another_host_is_refused_at_every_path(self, host: str, path: str) -> None:
        (response,) = asked(app_of(), ("GET", path, {"headers": {"Host": host}}))
        assert (response.status_code, code_of(response)) == (403, "host_not_allowed")

    def test_a_name_that_was_allowed_is_answered(self) -> None:
        app = app_of(allowed_hosts=["My-Box"])
        first, second = asked(app, *(("GET", "/health", {"headers": {"Host": h}}) for h in ("my-box:80", "my-box2")))
        assert (first.status_code, second.status_code) == (200, 403)

    def test_two_hosts_are_none(self) -> None:
        (response,) = asked(app_of(), ("GET", "/health", {"headers": [("Host", "localhost"), ("Host", "localhost")]}))
        assert response.status_code == 403

    def test_a_public_server_answers_to_names_only_where_a_key_is_needed(self) -> None:
        with_key = HostRule("0.0.0.0", (), has_keys=True)
        without = HostRule("0.0.0.0", (), has_keys=False)
        named = HostRule("0.0.0.0", ("box",), has_keys=True)
        assert [rule.allows("evil.example") for rule in (with_key, without, named)] == [True, False, False]
        assert [rule.allows("10.1.2.3:80") for rule in (with_key, without, named)] == [True, True, False]
        assert named.allows("box:1")

    def test_what_is_loopback(self) -> None:
        assert [is_loopback(h) for h in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
        assert [is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "")] == [False] * 5

    def test_an_allowed_host_has_no_port(self) -> None:
        with pytest.raises(OptionError, match="without a port"):
            app_of(allowed_hosts=["box:80"])


class TestRequests:
    @pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
    @pytest.mark.parametrize("path", ["/echo", "/v1/embeddings", "/nowhere"])
    def test_a_body_that_is_not_said_to_be_json_is_refused(self, kind: str, path: str) -> None:
        headers = {"Content-Type": kind} if kind else {}
        (response,) = asked(app_of(Jobs()), ("POST", path, {"content": b"{}", "headers": headers}))
        assert (response.status_code, code_of(response)) == (415, "content_type")

    def test_json_with_a_charset_is_json(self) -> None:
        headers = {"Content-Type": "Application/JSON; charset=utf-8"}
        (response,) = asked(app_of(Jobs()), ("POST", "/echo", {"content": b'{"a": 1}', "headers": headers}))
        assert response.json()["body"] == {"a": 1}

    def test_a_compressed_body_is_refused(self) -> None:
        (response,) = asked(app_of(Jobs()), ("POST", "/echo", {"json": {}, "headers": {"Content-Encoding": "gzip"}}))
        assert response.status_code == 415

    def test_no_answer_invites_other_origins(self) -> None:
        origin = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        responses = asked(
            app_of(), ("OPTIONS", "/v1/models", {"headers": origin}), ("GET", "/health", {"headers": origin})
        )
        assert [response.status_code for response in responses] == [405, 200]
        assert not [name for r in responses for name in r.headers if name.startswith("access-control")]

    @pytest.mark.parametrize("in_pieces", [False, True])
    def test_a_body_over_the_bound_is_a_413(self, in_pieces: bool) -> None:
        async def pieces() -> Any:
            for _ in range(11):
                yield b"[" * 100

        content = pieces() if in_pieces else b"[" * 1100
        request = {"content": content, "headers": {"Content-Type": "application/json"}}
        jobs = Jobs()
        (response,) = asked(app_of(jobs, max_body_bytes=1000), ("POST", "/echo", request))
        assert (response.status_code, code_of(response)) == (413, "body_too_large")

    def test_a_body_of_the_bound_is_taken(self) -> None:
        body = b'{"a":"' + b"x" * 992 + b'"}'
        assert len(body) == 1000
        request = {"content": body, "headers": {"Content-Type": "application/json"}}
        (response,) = asked(app_of(Jobs(), max_body_bytes=1000), ("POST", "/echo", request))
        assert response.status_code == 200

    def test_a_large_body_is_read_as_a_small_one(self) -> None:
        (response,) = asked(app_of(Jobs()), ("POST", "/echo", {"json": {"a": "x" * 300_000}}))
        assert len(response.json()["body"]["a"]) == 300_000

    def test_every_response_has_an_id(self) -> None:
        first, second, third = asked(
            app_of(),
            ("GET", "/health", {}),
            ("GET", "/nowhere", {}),
            ("GET", "/health", {"headers": {"X-Request-ID": "mine-1"}}),
        )
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        assert third.headers["x-request-id"] == "mine-1"

    def test_the_id_has_the_header_that_anthropics_clients_read(self) -> None:
        theirs, ours = asked(
            app_of(), ("POST", "/v1/messages", {"json": {}}), ("POST", "/v1/completions", {"json": {}})
        )
        assert theirs.headers["request-id"] == theirs.headers["x-request-id"]
        assert "request-id" not in ours.headers

    @pytest.mark.parametrize("given", ["", "a b", "x" * 129, "\u00e9", "a,b"])
    def test_an_id_that_is_none_is_refused(self, given: str) -> None:
        headers = {"X-Request-ID": given.encode("latin-1")}
        (response,) = asked(app_of(), ("GET", "/health", {"headers": headers}))
        assert (response.status_code, code_of(response)) == (400, "request_id")

    def test_an_id_that_is_in_use_is_refused_until_its_request_has_ended(self) -> None:
        jobs = Jobs()

        async def ask() -> None:
            import asyncio

            async with client_of(app_of(jobs)) as client:
                mine = {"X-Request-ID": "mine"}
                first = asyncio.create_task(client.post("/hold", json={}, headers=mine))
                while not jobs.signals:
                    await asyncio.sleep(0.001)
                second = await client.post("/echo", json={}, headers=mine)
                assert (second.status_code, code_of(second)) == (400, "duplicate_request_id")
                assert (await client.post("/echo", json={})).status_code == 200
                jobs.signals[0].set()
                assert (await first).status_code == 200
                assert (await client.post("/echo", json={}, headers=mine)).status_code == 200

        run(ask())


class TestProblems:
    @pytest.mark.parametrize(
        ("error", "status", "code"),
        [
            (HttpProblem(400, "unsupported_parameter", "no", "field"), 400, "unsupported_parameter"),
            (QueueFullError(3, 1.5), 429, "queue_full"),
            (ContextLengthError(9, 5), 400, "context_length_exceeded"),
            (ChatTemplateError("the template says no"), 400, "chat_template_error"),
            (InputError("token 9"), 400, "invalid_value"),
            (SessionBusyError("busy"), 409, "session_busy"),
            (UnknownSessionError("who"), 404, "session_not_found"),
            (PoolFullError(3, 2, 1), 503, "out_of_cells"),
            (SavedStateError("missing", "/secret/path", "no such file"), 404, "saved_state_missing"),
            (EngineError("a reason"), 500, "engine_error"),
            (ValueError("prompt: my secret"), 500, "internal_error"),
            (TimeoutError(), 503, "timeout"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
    )
    def test_an_error_has_its_status_in_the_shape_of_both_dialects(
        self, error: Exception, status: int, code: str
    ) -> None:
        jobs = Jobs()
        jobs.error = error
        ours, theirs = asked(app_of(jobs), ("POST", "/fail", {"json": {}}), ("POST", "/v1/messages/fail", {"json": {}}))
        assert (ours.status_code, code_of(ours)) == (status, code)
        assert ours.json()["error"].keys() >= {"message", "type", "param", "code"}
        assert theirs.status_code == status
        assert theirs.json()["type"] == "error"
        assert theirs.json()["error"].keys() == {"type", "message"}
        told = {"context_length_exceeded": "prompt is too long: 9 tokens > 5 maximum"}  # as agents look for it
        assert theirs.json()["error"]["message"] == told.get(code, ours.json()["error"]["message"])
        assert "secret" not in ours.text

    def test_a_full_queue_says_when_to_try_again(self) -> None:
        jobs = Jobs()
        jobs.error = QueueFullError(3, 1.5)
        (response,) = asked(app_of(jobs), ("POST", "/fail", {"json": {}}))
        assert response.headers["retry-after"] == "2"

    def test_a_context_that_is_too_long_says_both_counts(self) -> None:
        problem = problem_of(ContextLengthError(9, 5))
        assert problem.body("openai")["error"].items() >= {"n_prompt_tokens": 9, "n_ctx": 5}.items()

    @pytest.mark.usefixtures("with_keys")
    def test_a_refusal_of_the_guard_has_the_shape_of_the_dialect(self) -> None:
        (response,) = asked(app_of(), ("POST", "/v1/messages", {"json": {}}))
        assert response.status_code == 401
        assert response.json() == {
            "type": "error",
            "error": {"type": "authentication_error", "message": response.json()["error"]["message"]},
        }


class TestLogs:
    def test_a_line_can_be_neither_forged_nor_does_it_tell_secrets(
        self, caplog: pytest.LogCaptureFixture, with_keys: None
    ) -> None:
        jobs = Jobs()
        jobs.error = ValueError("PROMPT in a message")
        with caplog.at_level(logging.DEBUG):
            asked(
                app_of(jobs),
                ("GET", "/a%0d%0aINFO%20forged%1b[2J%7f%E2%80%AE?token=SECRET", {"headers": BEARER}),
                ("POST", "/fail", {"json": {"prompt": "PROMPT"}, "headers": BEARER}),
            )
        lines = [record.getMessage() for record in caplog.records if record.name.startswith("ggml_engine.server")]
        text = "\n".join(lines)
        assert r"GET /a\r\nINFO forged\x1b[2J\x7f\u202e 404" in text
        assert "ValueError" in text
        for secret in (KEY, "PROMPT", "SECRET", "Bearer"):
            assert secret not in text
        assert not any(ord(c) < 32 and c != "\n" for c in text)

    def test_a_long_path_is_cut(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            asked(app_of(), ("GET", "/" + "x" * 5000, {}))
        assert max(len(record.getMessage()) for record in caplog.records if record.name != "httpx") < 400
