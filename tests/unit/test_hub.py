"""Pulling model files, against a server on this machine that answers as the hub does."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from ggml_engine import hub
from ggml_engine.errors import DownloadError, InputError
from ggml_engine.hub import Reference, choose_files, parse_reference, pull

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHUNK = 64 * 1024


class Hub:
    """What the server holds, and what it was asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.listed: list[str] | None = None
        self.etags: dict[str, str] = {}
        self.status: tuple[int, str] | None = None  # answered to everything, with the hub's error code
        self.cut_after: int | None = None  # bytes of the next body, after which the connection is dropped
        self.ranges: list[str | None] = []
        self.sent: list[int] = []  # bytes of each body, noted before its first byte goes out
        self.storage: str | None = None  # another host, to which downloads are redirected
        self.requests: list[str] = []
        self.authorization: dict[str, str | None] = {}  # by host and method

    @property
    def n_sent(self) -> int:
        return sum(self.sent)

    def etag(self, name: str) -> str:
        return self.etags.get(name) or hashlib.sha256(self.files[name]).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(self.path.split("?")[0])
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.authorization[f"{self.command} {self.headers['Host']}"] = self.headers.get("Authorization")
        if self.hub.status is not None:
            status, code = self.hub.status
            self._send(status, b"{}", {"X-Error-Code": code} if code else {}, body=body)
        elif path.startswith("/api/models/me/model"):
            if "/revision/" in path and not path.endswith(("/main", COMMIT)):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)
                return
            names = self.hub.listed if self.hub.listed is not None else [*self.hub.files, "README.md"]
            answer = {"id": "me/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, body=body)
        elif path.startswith(f"/me/model/resolve/{COMMIT}/"):
            self._send_file(path.removeprefix(f"/me/model/resolve/{COMMIT}/"), body=body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _send_file(self, name: str, *, body: bool) -> None:
        if name not in self.hub.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body=body)
            return
        content = self.hub.files[name]
        if self.hub.storage is not None and self.headers["Host"] != self.hub.storage:
            linked = {"X-Linked-Etag": f'"{self.hub.etag(name)}"', "X-Linked-Size": str(len(content))}
            where = {"Location": f"http://{self.hub.storage}{self.path}", "X-Repo-Commit": COMMIT}
            self._send(302, b"", {**linked, **where}, body=body)
            return
        start = 0
        if body:
            wanted = self.headers.get("Range")
            self.hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        end = len(content)
        if body:
            if self.hub.cut_after is not None:
                end, self.hub.cut_after = start + self.hub.cut_after, None
                self.close_connection = True
            self.hub.sent.append(end - start)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{self.hub.etag(name)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            with contextlib.suppress(ConnectionError):  # a client that stops midway
                self.wfile.write(content[start:end])


@pytest.fixture
def server() -> Iterator[tuple[Hub, str]]:
    held = Hub()
    handler = type("BoundHandler", (Handler,), {"hub": held})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield held, f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()
        thread.join(10)


@pytest.fixture(autouse=True)
def small_and_quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Small chunks, no waiting before a retry, no token and no cache of the user's; the client is closed at the end."""
    import huggingface_hub.constants
    import huggingface_hub.file_download

    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
    yield
    huggingface_hub.close_session()


@pytest.fixture
def fetch(server: tuple[Hub, str], tmp_path: Path) -> Callable[..., Path]:
    def run(file: str | None = None, repo: str = "me/model", **options: Any) -> Path:
        return pull(repo, file, directory=tmp_path / "models", endpoint=server[1], **options)

    return run


def reason(fetch: Callable[..., Path], *args: Any, **options: Any) -> str:
    with pytest.raises(DownloadError) as caught:
        fetch(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CONTENT = bytes(range(256)) * 4096  # 1 MiB
PARTS = [f"m-Q8_0-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


# --- names


@pytest.mark.parametrize(
    ("text", "repo", "file"),
    [
        ("me/model", "me/model", None),
        ("me/model:Q4_K_M", "me/model", "Q4_K_M"),
        ("me/model-GGUF:sub/model.Q8_0.gguf", "me/model-GGUF", "sub/model.Q8_0.gguf"),
        ("https://huggingface.co/me/model", "me/model", None),
        ("hf.co/me/model:a.gguf", "me/model", "a.gguf"),
        ("gpt2", "gpt2", None),
    ],
)
def test_a_reference_names_a_repository_and_perhaps_a_file(text: str, repo: str, file: str | None) -> None:
    assert parse_reference(text) == Reference(repo, file)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "me/", "me/model:", "me/model/more", "../x", "me/..", "me/a b", "/me/model", "me/model:../x.gguf"),
        *(
            "me/model:/etc/passwd",
            "me/model:a/../../x",
            "me/model:a\\b.gguf",
            "me/model:C:x.gguf",
            "me/model:a//b.gguf",
        ),
        *("me/model:.hidden", "me/model:a\0b", "me/model:con.gguf", "me/model:a. ", "ftp://x/me/model"),
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_reference(text)


def test_the_only_model_is_chosen() -> None:
    assert choose_files(["README.md", "m.F16.gguf", "mmproj-m.gguf", "m.imatrix.gguf"], None) == ["m.F16.gguf"]


def test_among_several_the_usual_quant_is_chosen() -> None:
    assert choose_files(["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-Q4_K_S.gguf"], None) == ["m-Q4_K_M.gguf"]


def test_without_the_usual_quant_the_names_are_listed() -> None:
    with pytest.raises(DownloadError, match=r"r has no files of Q4_K_M; name one: m-F16\.gguf, m-Q8_0\.gguf"):
        choose_files(["m-Q8_0.gguf", "m-F16.gguf"], None, "r")


def test_a_quant_is_matched_whole_and_in_any_case() -> None:
    names = ["m.Q4_K_M.gguf", "m.Q4_K_S.gguf", "m.IQ4_K_M.gguf", "m.q8_0.gguf"]
    assert choose_files(names, "q4_k_m") == ["m.Q4_K_M.gguf"]
    assert choose_files(names, "Q8_0") == ["m.q8_0.gguf"]
    for wanted in ("Q4_K", "Q4", "_0", "Q8"):
        with pytest.raises(DownloadError, match=f"no files of {wanted}"):
            choose_files(names, wanted)
    with pytest.raises(DownloadError, match="2 files of Q8_0"):
        choose_files(["a.Q8_0.gguf", "b.Q8_0.gguf"], "Q8_0")


def test_a_split_model_is_chosen_with_all_its_parts() -> None:
    for wanted in (None, "Q8_0", PARTS[1]):
        assert choose_files(PARTS[::-1], wanted) == PARTS
    with pytest.raises(DownloadError, match="r has 2 of the 3 parts of m-Q8_0"):
        choose_files(PARTS[:2], None, "r")
    with pytest.raises(DownloadError, match="parts"):
        choose_files([PARTS[0], PARTS[2], "m-Q8_0-00004-of-00003.gguf"], None)


def test_a_file_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(DownloadError, match=r"r has no file b\.gguf: a\.gguf"):
        choose_files(["a.gguf"], "b.gguf", "r")
    with pytest.raises(DownloadError, match=r"r holds no \.gguf file"):
        choose_files(["model.safetensors"], None, "r")


# --- fetching


def test_a_file_is_fetched_to_its_place(server: tuple[Hub, str], fetch: Callable[..., Path], tmp_path: Path) -> None:
    server[0].files["m.gguf"] = CONTENT
    told: list[tuple[int, int | None]] = []
    path = fetch(progress=lambda done, total: told.append((done, total)))
    assert path == tmp_path / "models" / "me" / "model" / "m.gguf"
    assert path.read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert not list(path.parent.glob("*.partial")) + list(path.parent.glob(".*.partial"))


def test_a_file_that_is_there_is_not_fetched_again(server: tuple[Hub, str], fetch: Callable[..., Path]) -> None:
    held, _ = server
    held.files["m.gguf"] = CONTENT
    path = fetch()
    told: list[int] = []
    assert fetch(progress=lambda done, _total: told.append(done)) == path
    assert held.n_sent == len(CONTENT)
    assert told == [len(CONTENT)]


def test_a_file_that_changed_on_the_hub_is_fetched_anew(server: tuple[Hub, str], fetch: Callable[..., Path]) -> None:
    held, _ = server
    held.files["m.gguf"] = CONTENT
    fetch()
    held.files["m.gguf"] = CONTENT[::-1]
    assert fetch().read_bytes() == CONTENT[::-1]


class StopError(Exception):
    pass


def test_a_stopped_download_goes_on_where_it_was(server: tuple[Hub, str], fetch: Callable[..., Path]) -> None:
    held, _ = server
    held.files["m.gguf"] = CONTENT

    def stop_midway(done: int, total: int | None) -> None:
        if done >= len(CONTENT) // 2:
            raise StopError

    with pytest.raises(StopError):
        fetch(progress=stop_midway)
    held.sent.clear()
    held.ranges.clear()
    told: list[int] = []
    path = fetch(progress=lambda done, _total: told.append(done))
    assert path.read_bytes() == CONTENT
    (wanted,) = held.ranges
    assert wanted is not None
    n_there = int(wanted.removeprefix("bytes=").rstrip("-"))
    # The chunk whose report stopped it was counted, but not written.
    assert n_there == len(CONTENT) // 2 - CHUNK
    assert held.n_sent == len(CONTENT) - n_there
    assert told[0] == n_there
    assert told[-1] == len(CONTENT)


def test_a_dropped_connection_is_taken_up_again(server: tuple[Hub, str], fetch: Callable[..., Path]) -> None:
    held, _ = server
    held.files["m.gguf"] = CONTENT
    held.cut_after = 5 * CHUNK
    assert fetch().read_bytes() == CONTENT
    assert held.ranges == [None, f"bytes={5 * CHUNK}-"]
    assert held.sent == [5 * CHUNK, len(CONTENT) - 5 * CHUNK]


def test_a_partial_file_of_another_content_is_not_continued(
    server: tuple[Hub, str], fetch: Callable[..., Path]
) -> None:
    held, _ = server
    held.files["m.gguf"] = CONTENT
    with pytest.raises(StopError):
        fetch(progress=raise_stop)
    held.files["m.gguf"] = CONTENT[::-1]
    path = fetch()
    assert path.read_bytes() == CONTENT[::-1]
    assert not list(path.parent.glob(".*.partial"))


def raise_stop(done: int, total: int | None) -> None:
    if done > CHUNK:
        raise StopError


def test_a_resumed_file_that_is_damaged_is_thrown_away(
    server: tuple[Hub, str], fetch: Callable[..., Path], tmp_path: Path
) -> None:
    held, _ = server
    held.files["m.gguf"] = CONTENT
    with pytest.raises(StopError):
        fetch(progress=raise_stop)
    (partial,) = (tmp_path / "models" / "me" / "model").glob(".*.partial")
    partial.write_bytes(b"x" * partial.stat().st_size)
    assert "m.gguf arrived damaged" in reason(fetch)
    assert not (tmp_path / "models" / "me" / "model" / "m.gguf").exists()
    assert fetch().read_bytes() == CONTENT


def test_all_parts_of_a_split_file_are_fetched(server: tuple[Hub, str], fetch: Callable[..., Path]) -> None:
    held, _ = server
    for index, name in enumerate(PARTS):
        held.files[name] = bytes([index]) * 100_000
    told: list[tuple[int, int | None]] = []
    path = fetch("Q8_0", progress=lambda done, total: told.append((done, total)))
    assert path.name == PARTS[0]
    assert [path.with_name(name).read_bytes()[0] for name in PARTS] == [0, 1, 2]
    assert told[-1] == (300_000, 300_000)


def test_a_name_with_a_folder_goes_into_that_folder(server: tuple[Hub, str], fetch: Callable[..., Path]) -> None:
    server[0].files["Q8_0/m [x] é.gguf"] = b"abc"
    assert fetch("Q8_0").parts[-3:] == ("model", "Q8_0", "m [x] é.gguf")


def test_a_server_cannot_name_a_place_outside(
    server: tuple[Hub, str], fetch: Callable[..., Path], tmp_path: Path
) -> None:
    held, _ = server
    for name in ("../../../evil.gguf", "/tmp/evil.gguf", "a/../../../../evil.gguf", "..\\evil.gguf", "C:evil.gguf"):
        held.listed = [name]
        assert "not a safe name" in reason(fetch)
    assert not list(tmp_path.rglob("*evil*"))


def test_a_file_that_another_process_fetches_is_left_alone(
    server: tuple[Hub, str], fetch: Callable[..., Path], tmp_path: Path
) -> None:
    import filelock

    server[0].files["m.gguf"] = CONTENT
    folder = tmp_path / "models" / "me" / "model"
    folder.mkdir(parents=True)
    with filelock.FileLock(str(folder / ".m.gguf.lock")):
        assert "another process is fetching m.gguf" in reason(fetch)
    assert fetch().is_file()


# --- failures


def test_a_missing_repository_and_revision_are_told(server: tuple[Hub, str], fetch: Callable[..., Path]) -> None:
    assert reason(fetch, repo="me/nothing").startswith("there is no repository me/nothing, or it is private")
    assert reason(fetch, revision="v9").startswith("me/model has no revision v9")


def test_a_listed_file_that_is_missing_is_told(server: tuple[Hub, str], fetch: Callable[..., Path]) -> None:
    server[0].listed = ["gone.gguf"]
    assert reason(fetch).startswith("me/model lists a file that it does not have")


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (403, "GatedRepo", "me/model is gated: accept its terms"),
        (401, "GatedRepo", "me/model is gated: accept its terms"),
        (401, "RepoNotFound", "no repository me/model, or it is private"),
        (401, "", "access to me/model is denied (401)"),
        (403, "", "access to me/model is denied (403)"),
        (500, "", "the server answered 500 for me/model"),
    ],
)
def test_a_refusing_server_is_quoted(
    server: tuple[Hub, str], fetch: Callable[..., Path], status: int, code: str, told: str
) -> None:
    server[0].status = (status, code)
    assert told in reason(fetch)


def test_no_network_is_told() -> None:
    with pytest.raises(DownloadError, match=r"^fetching me/model failed: .+ \(ConnectError\)$"):
        pull("me/model", endpoint="http://127.0.0.1:9")


def test_a_full_disk_is_told_before_anything_is_fetched(
    server: tuple[Hub, str], fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server[0].files["m.gguf"] = CONTENT * 4
    usage = hub.shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _path: usage)
    assert reason(fetch).startswith("m.gguf needs 4 MiB more, 1 MiB are free in ")
    assert server[0].n_sent == 0


def test_a_disk_that_fills_up_meanwhile_is_told(
    server: tuple[Hub, str], fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server[0].files["m.gguf"] = CONTENT

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    assert reason(fetch) == "the disk is full while fetching me/model"


def test_a_place_that_cannot_be_written_is_told(server: tuple[Hub, str], tmp_path: Path) -> None:
    server[0].files["m.gguf"] = CONTENT
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DownloadError, match="cannot be written: "):
        pull("me/model", directory=tmp_path / "file" / "sub", endpoint=server[1])


def test_a_token_is_sent_to_the_hub(server: tuple[Hub, str], fetch: Callable[..., Path]) -> None:
    server[0].files["m.gguf"] = CONTENT
    fetch(token="hf_secret")
    assert set(server[0].authorization.values()) == {"Bearer hf_secret"}


def test_a_token_is_not_sent_to_the_storage_host(server: tuple[Hub, str], fetch: Callable[..., Path]) -> None:
    held, endpoint = server
    held.files["m.gguf"] = CONTENT
    held.storage = endpoint.removeprefix("http://").replace("127.0.0.1", "localhost")
    assert fetch(token="hf_secret").read_bytes() == CONTENT
    assert held.authorization[f"GET {held.storage}"] is None
    assert held.authorization[f"HEAD {endpoint.removeprefix('http://')}"] == "Bearer hf_secret"


def test_without_huggingface_hub_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match=r"pip install 'ggml-engine\[pull\]'"):
        pull("me/model")


def test_huggingface_hub_is_not_imported_before_it_is_needed() -> None:
    script = "import sys, ggml_engine.hub as h; h.parse_reference('a/b'); assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_models_go_to_the_users_cache_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GGML_ENGINE_MODELS", str(tmp_path))
    assert hub.default_directory() == tmp_path
    monkeypatch.delenv("GGML_ENGINE_MODELS")
    assert hub.default_directory().parts[-2:] == ("ggml-engine", "models")
