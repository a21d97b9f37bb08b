"""What a saved file may be: each kind of damage is a typed error, and nothing that lives is touched."""

from __future__ import annotations

import copy
import errno
import hashlib
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from control_bench import PROMPT, Bench, bench
from fake_executor import WAIT_S
from saved_bench import file_of, forged, sealed, state_of, with_text

from ggml_engine.control import saved_file, saved_names
from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.runner import Runner
from ggml_engine.control.saved_format import HEAD, MAGIC, VERSION
from ggml_engine.control.saved_names import names_in
from ggml_engine.errors import EngineError, SavedStateError

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a session of nine tokens."""
    directory = tmp_path_factory.mktemp("saved")
    with bench() as b, b.session_at() as session:
        session.save(directory, "one", WAIT_S)
    return file_of(directory, "one").read_bytes()


@pytest.fixture(scope="module")
def live() -> Iterator[Bench]:
    """A runner with a session in it, which must not be touched."""
    with bench() as b, b.session_at([1, 2, 3]):
        yield b


@contextmanager
def untouched(b: Bench, *, may_ask: bool = False) -> Iterator[None]:
    """Everything that lives is left as it was; unless `may_ask`, the executor is asked for nothing."""
    before = state_of(b)
    n_calls = len(b.executor.calls)
    yield
    assert state_of(b) == before
    assert may_ask or b.executor.calls[n_calls:] == []


def refused(
    b: Bench, directory: Path, code: str, match: str | None = None, name: str = "one", *, may_ask: bool = False
) -> SavedStateError:
    """Loading is refused with this code, and leaves everything as it was, see `untouched`."""
    with untouched(b, may_ask=may_ask), pytest.raises(SavedStateError, match=match) as caught:
        b.runner.load_session(directory, name, WAIT_S)
    assert caught.value.code == code, caught.value
    return caught.value


def code_of(b: Bench, directory: Path) -> str:
    """What loading is refused with."""
    with pytest.raises(SavedStateError) as caught:
        b.runner.load_session(directory, "one", WAIT_S)
    return caught.value.code


# ---- damage


def test_a_file_that_is_whole_is_taken(tmp_path: Path, live: Bench, written: bytes) -> None:
    file_of(tmp_path, "one").write_bytes(written)
    with live.runner.load_session(tmp_path, "one", WAIT_S) as session:
        assert session.tokens == PROMPT


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path, live: Bench, written: bytes) -> None:
    path = file_of(tmp_path, "one")
    with untouched(live):
        for n in range(len(written)):
            path.write_bytes(written[:n])
            assert code_of(live, tmp_path) == ("damaged" if n else "foreign"), n


def test_a_file_with_more_behind_it_is_refused(tmp_path: Path, live: Bench, written: bytes) -> None:
    file_of(tmp_path, "one").write_bytes(written + b"\0")
    refused(live, tmp_path, "damaged", f"written with {len(written)} bytes and has {len(written) + 1}")


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_byte_matters(tmp_path: Path, live: Bench, written: bytes, flip: int) -> None:
    path = file_of(tmp_path, "one")
    with untouched(live):
        for at in range(len(written)):
            changed = bytearray(written)
            changed[at] ^= flip
            path.write_bytes(changed)
            assert code_of(live, tmp_path) == ("foreign" if at < 8 else "version" if at < 12 else "damaged"), at


def test_a_file_of_another_version_says_which(tmp_path: Path, live: Bench, written: bytes) -> None:
    body = MAGIC + struct.pack("<I", 7) + written[12:-32]
    file_of(tmp_path, "one").write_bytes(sealed(body))
    refused(live, tmp_path, "version", f"version 7 of the format, {VERSION} can be read")


@pytest.mark.parametrize(
    "content", [b"", b"GGUF" + bytes(60), b"\x80\x04pickle", b"{}", MAGIC[:-1] + b"\n" + bytes(90)]
)
def test_other_files_are_no_saved_states(tmp_path: Path, live: Bench, content: bytes) -> None:
    file_of(tmp_path, "one").write_bytes(content)
    refused(live, tmp_path, "foreign")


def test_pipes_and_directories_are_no_saved_states(tmp_path: Path, live: Bench) -> None:
    os.mkfifo(file_of(tmp_path, "one"))
    refused(live, tmp_path, "foreign", "no regular file")
    file_of(tmp_path, "two").mkdir()
    refused(live, tmp_path, "foreign", "no regular file", name="two")


def test_a_file_that_is_not_there_is_missing(tmp_path: Path, live: Bench) -> None:
    refused(live, tmp_path, "missing")
    refused(live, tmp_path / "nowhere", "missing")
    assert names_in(tmp_path / "nowhere") == []


# ---- files whose checksum is right, and which are still no states of ours


def _set(**values: Any) -> Change:
    return lambda metadata: metadata.update(values)


def _sequence(**values: Any) -> Change:
    return lambda metadata: metadata["sequences"][0].update(values)


HUGE = 2**63
CHANGES: dict[str, Change] = {
    "many rows": _set(n_rows=HUGE),
    "more rows": _set(n_rows=10),
    "fewer rows": _set(n_rows=8),
    "no rows": _set(n_rows=0),
    "rows of a product that is right": _set(n_rows=72, row_bytes=1),
    "rows of no bytes": _set(row_bytes=0),
    "negative rows": _set(n_rows=-1),
    "rows as text": _set(n_rows="9"),
    "rows as a fraction": _set(n_rows=9.0),
    "rows as a truth": _set(n_rows=True),
    "rows of a number that is too long": _set(n_rows=int("9" * 4000)),
    "no sequences": _set(sequences=[]),
    "sequences as an object": _set(sequences={}),
    "a sequence that is none": _set(sequences=[3]),
    "many tokens": _sequence(n_tokens=HUGE),
    "fewer tokens": _sequence(n_tokens=8),
    "tokens for rows": _sequence(n_tokens=10, n_rows=8),
    "negative tokens": _sequence(n_tokens=-1),
    "no count of tokens": lambda metadata: metadata["sequences"][0].pop("n_tokens"),
    "a pending token beyond the vocabulary": _sequence(pending=97),
    "a negative pending token": _sequence(pending=-1),
    "a pending token as text": _sequence(pending="5"),
    "twice the sequence": lambda metadata: metadata["sequences"].append(metadata["sequences"][0]),
    "no kind": lambda metadata: metadata.pop("kind"),
    "no fingerprint": lambda metadata: metadata.pop("fingerprint"),
    "a fingerprint that is no text": _set(fingerprint=None),
    "no description": lambda metadata: metadata.pop("made_for"),
    "a description of numbers": _set(made_for={"model": 5}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_metadata_that_do_not_fit_are_refused(tmp_path: Path, live: Bench, written: bytes, change: Change) -> None:
    path = file_of(tmp_path, "one")
    path.write_bytes(written)
    forged(path, change)
    refused(live, tmp_path, "damaged", may_ask=True)


TEXTS = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "a number": b"1",
    "not UTF-8": b'{"kind":"\xff"}',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "no number": b'{"kind":NaN}',
    "a number of many digits": b'{"n_rows":' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_metadata_that_are_none_are_refused(tmp_path: Path, live: Bench, text: bytes) -> None:
    with_text(file_of(tmp_path, "one"), text, b"")
    refused(live, tmp_path, "damaged")


def test_the_length_of_metadata_is_bounded_before_they_are_read(tmp_path: Path, live: Bench) -> None:
    for n in (5 << 20, 2**32 - 1):
        body = HEAD.pack(MAGIC, VERSION, n, HEAD.size + (6 << 20) + 32) + b" " * (6 << 20)
        file_of(tmp_path, "one").write_bytes(sealed(body))
        refused(live, tmp_path, "damaged", f"{n} bytes of metadata")


def test_rows_of_no_bytes_are_not_allocated_for(tmp_path: Path, live: Bench, written: bytes) -> None:
    path = file_of(tmp_path, "one")
    path.write_bytes(written)
    forged(path, _set(row_bytes=0, n_rows=2**40), rest=lambda rest: rest[:72])
    refused(live, tmp_path, "damaged", "rows of 0 bytes", may_ask=True)


def _rows(*rows: int) -> Callable[[bytes], bytes]:
    """Another table; it stands behind nine tokens."""
    return lambda rest: rest[:36] + struct.pack("<9I", *rows) + rest[72:]


def _tokens(*tokens: int) -> Callable[[bytes], bytes]:
    return lambda rest: struct.pack("<9i", *tokens) + rest[36:]


@pytest.mark.parametrize(
    "rest",
    [
        _rows(0, 1, 2, 3, 4, 5, 6, 7, 9),
        _rows(0, 1, 2, 3, 4, 5, 6, 7, 2**32 - 1),
        _rows(0, 1, 2, 3, 4, 5, 6, 7, 7),
        _rows(0, 0, 0, 0, 0, 0, 0, 0, 0),
        _tokens(0, 1, 2, 3, 4, 5, 6, 7, 97),
        _tokens(0, 1, 2, 3, 4, 5, 6, 7, -1),
        _tokens(-(2**31), 1, 2, 3, 4, 5, 6, 7, 8),
    ],
)
def test_tables_and_tokens_out_of_range_are_refused(
    tmp_path: Path, live: Bench, written: bytes, rest: Callable[[bytes], bytes]
) -> None:
    path = file_of(tmp_path, "one")
    path.write_bytes(written)
    forged(path, rest=rest)
    refused(live, tmp_path, "damaged", may_ask=True)


def test_a_file_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, live: Bench, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path, "one")
    path.write_bytes(written)
    check = saved_file._check_digest

    def check_and_change(*arguments: Any) -> None:
        check(*arguments)
        changed = bytearray(written)
        changed[-40] ^= 1  # of the last row
        path.write_bytes(changed)

    monkeypatch.setattr(saved_file, "_check_digest", check_and_change)
    refused(live, tmp_path, "damaged", "changed while it was read", may_ask=True)


# ---- made for others


def test_a_file_of_another_model_says_what_it_was_made_for(tmp_path: Path, live: Bench) -> None:
    with bench(fingerprint="other") as b, b.session_at() as session:
        session.save(tmp_path, "one", WAIT_S)
    error = refused(live, tmp_path, "other-model", "it has fingerprint 'other' and not 'fake'")
    assert "another model or execution" in str(error)
    with pytest.raises(SavedStateError) as caught:
        PrefixCache(4).load(live.runner, tmp_path, "one", WAIT_S)
    assert caught.value.code == "other-kind"


def test_rows_of_another_width_are_refused(tmp_path: Path, live: Bench) -> None:
    with bench(row_bytes=16) as b, b.session_at() as session:
        session.save(tmp_path, "one", WAIT_S)
    refused(live, tmp_path, "damaged", "rows of 16 bytes are given, here a cell has 8", may_ask=True)


# ---- names

GOOD = ["a", "0", "_", "prefix-cache", "a.b", "user_42.v1-2", "x" * 64, "console", "com", "lpt10"]
BAD = [
    "", ".", "..", ".hidden", "-x", "a/b", "../a", "a\\b", "/etc/passwd", "a b", "a\n", "\na", "a\0", "A", "é", "x" * 65, "a:b", "con",
    "nul", "aux.txt", "prn", "com1", "lpt9.x", "a*", "~a", "%2e%2e", "\u0430", None, 5, b"a",
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_allowed_names_are_saved_listed_and_loaded(tmp_path: Path, live: Bench, name: str) -> None:
    with live.session_at() as session:
        session.save(tmp_path, name, WAIT_S)
    assert Runner.saved_names(tmp_path) == [name]
    live.runner.load_session(tmp_path, name, WAIT_S).close()


@pytest.mark.parametrize("name", BAD)
def test_other_names_are_refused_for_everything(tmp_path: Path, live: Bench, name: Any) -> None:
    cache = PrefixCache(4)
    with live.session_at() as session:
        calls: list[Callable[[], object]] = [
            lambda: session.save(tmp_path / "in", name, WAIT_S),
            lambda: live.runner.load_session(tmp_path / "in", name, WAIT_S),
            lambda: cache.save(tmp_path / "in", name, WAIT_S, runner=live.runner),
            lambda: cache.load(live.runner, tmp_path / "in", name, WAIT_S),
        ]
        for call in calls:
            with pytest.raises(SavedStateError, match="a name is 1 to 64 of") as caught:
                call()
            assert caught.value.code == "name"
    assert list(tmp_path.iterdir()) == []


def test_a_listing_shows_names_only(tmp_path: Path, live: Bench) -> None:
    with live.session_at() as session:
        for name in ("b", "a"):
            session.save(tmp_path, name, WAIT_S)
    for other in ("notes.txt", ".b.ggkv.x.tmp", ".c.ggkv", "UPPER.ggkv", "con.ggkv", ".ggkv"):
        (tmp_path / other).write_bytes(b"")
    assert Runner.saved_names(tmp_path) == ["a", "b"]
    with pytest.raises(SavedStateError) as caught:
        Runner.saved_names(tmp_path / "notes.txt")
    assert caught.value.code == "io"


# ---- writing


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("function", ["replace", "fsync"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()]
)
def test_what_fails_before_the_end_leaves_the_old_file(
    tmp_path: Path, live: Bench, monkeypatch: pytest.MonkeyPatch, function: str, error: BaseException
) -> None:
    path = file_of(tmp_path, "one")
    with live.session_at() as session:
        session.save(tmp_path, "one", WAIT_S)
        before = path.read_bytes()
        with live.session_at([7, 7]) as other, monkeypatch.context() as patched:
            patched.setattr(saved_names.os, function, failing(error))
            with pytest.raises((SavedStateError, KeyboardInterrupt, MemoryError)) as caught:
                other.save(tmp_path, "one", WAIT_S)
            if isinstance(error, OSError):
                assert isinstance(caught.value, SavedStateError)
                assert caught.value.code == "io"
                assert "No space left" in str(caught.value)
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
        assert path.read_bytes() == before


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path) -> None:
    """A process whose files may have no more than some KiB: the write itself fails."""
    with bench() as b, b.session_at() as session:
        session.save(tmp_path, "one", WAIT_S)
    before = file_of(tmp_path, "one").read_bytes()
    program = """
import resource, signal, sys
from control_bench import bench
from ggml_engine.errors import SavedStateError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
with bench(row_bytes=1 << 14) as b, b.session_at() as session:
    try:
        session.save(sys.argv[1], "one", 10)
    except SavedStateError as error:
        print(error.code)
"""
    done = _run(program, str(tmp_path))
    assert done.stdout.strip() == "io", done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["one.ggkv"]
    assert file_of(tmp_path, "one").read_bytes() == before


def test_a_process_that_dies_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    with bench() as b, b.session_at() as session:
        session.save(tmp_path, "one", WAIT_S)
    before = file_of(tmp_path, "one").read_bytes()
    program = """
import os, sys
from control_bench import bench
os.replace = lambda *_: os._exit(9)
with bench() as b, b.session_at([4, 4, 4]) as session:
    session.save(sys.argv[1], "one", 10)
"""
    assert _run(program, str(tmp_path)).returncode == 9
    assert file_of(tmp_path, "one").read_bytes() == before
    assert Runner.saved_names(tmp_path) == ["one"]
    assert len(list(tmp_path.iterdir())) == 2  # what it had written stays, under no name


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    support = str(Path(__file__).parents[1] / "support")
    path = os.pathsep.join([support, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path, live: Bench) -> None:
    (tmp_path / "file").write_bytes(b"")
    with live.session_at() as session, pytest.raises(SavedStateError) as caught:
        session.save(tmp_path / "file", "one", WAIT_S)
    assert caught.value.code == "io"


def test_the_checksum_is_that_of_all_before_it(written: bytes) -> None:
    assert hashlib.sha256(written[:-32]).digest() == written[-32:]


def test_the_error_can_be_copied_and_pickled() -> None:
    error = SavedStateError("damaged", Path("a") / "b", "it is short")
    for same in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert isinstance(same, EngineError)
        assert (same.code, same.path, same.reason, str(same)) == (error.code, error.path, error.reason, str(error))
