"""Finding, opening and checking the native libraries; their logs, their aborts, and how the process ends."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import c_headers
import pytest
from compilers import has_compiler

from ggml_engine.errors import LibraryError
from ggml_engine.ggml import library
from ggml_engine.ggml.library import ffi

ROOT = Path(library.__file__).parents[2]
NAMES = ("ggml-base", "ggml", "llama")


def run(code: str, *, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that sees this tree and the tests' support."""
    path = os.pathsep.join([str(ROOT), str(Path(c_headers.__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


# ---- names and places


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("linux", "libggml-base.so"),
        ("darwin", "libggml-base.dylib"),
        ("win32", "ggml-base.dll"),
        ("freebsd14", "libggml-base.so"),
    ],
)
def test_library_files_are_named_as_their_platform_names_them(platform: str, expected: str) -> None:
    assert library.library_file("ggml-base", platform) == expected


def place_dummies(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in NAMES:
        (directory / library.library_file(name)).write_bytes(b"")
    return directory


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No llama_cpp, no override, not frozen."""
    monkeypatch.delenv("GGML_ENGINE_LIBRARIES", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


def freeze(monkeypatch: pytest.MonkeyPatch, executable: Path, bundle: Path | None = None) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", str(executable))
    if bundle is not None:
        monkeypatch.setattr(sys, "_MEIPASS", str(bundle), raising=False)


def test_the_installed_package_is_found_without_importing_it() -> None:
    done = run(
        "import sys; from ggml_engine.ggml import library; print(library.find_directory(), 'llama_cpp' in sys.modules)"
    )
    directory, imported = done.stdout.rsplit(maxsplit=1)
    assert Path(directory).parent.name == "llama_cpp"
    assert imported == "False"


def test_the_folder_that_the_environment_names_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = place_dummies(tmp_path / "own")
    monkeypatch.setenv("GGML_ENGINE_LIBRARIES", str(own))
    assert library.find_directory() == own
    assert len(library.library_directories()) == 2
    (own / library.library_file("llama")).unlink()
    assert library.find_directory() != own, "a folder that lacks one of the three is passed over"


def test_the_installed_package_comes_before_the_frozen_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = place_dummies(tmp_path / "site-packages" / "llama_cpp" / "lib")
    spec = importlib.machinery.ModuleSpec("llama_cpp", None, is_package=True)
    spec.submodule_search_locations = [str(installed.parent)]
    monkeypatch.delenv("GGML_ENGINE_LIBRARIES", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    bundle = place_dummies(tmp_path / "bundle" / "llama_cpp" / "lib").parents[1]
    freeze(monkeypatch, tmp_path / "app", bundle)
    assert library.find_directory() == installed


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize("inside", ["llama_cpp/lib", "lib/llama_cpp/lib", "."])
def test_a_frozen_application_finds_its_bundled_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    bundle = tmp_path / "bundle"
    expected = place_dummies(bundle / inside) if inside != "." else place_dummies(bundle)
    freeze(monkeypatch, tmp_path / "dist" / "app", bundle)
    assert library.find_directory().resolve() == expected.resolve()


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize("inside", ["MacOS/llama_cpp/lib", "Resources/lib/llama_cpp/lib", "Frameworks"])
def test_a_bundle_without_an_unpacking_folder_is_searched_around_its_executable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    contents = tmp_path / "App.app" / "Contents"
    expected = place_dummies(contents / inside)
    freeze(monkeypatch, contents / "MacOS" / "app")
    assert library.find_directory() == expected


@pytest.mark.usefixtures("not_installed")
def test_missing_libraries_name_what_to_install() -> None:
    with pytest.raises(LibraryError, match=r"llama_cpp is not installed.*pip install llama-cpp-python==0\.3\.36"):
        library.find_directory()


@pytest.mark.usefixtures("not_installed")
def test_missing_libraries_name_the_folders_that_were_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_ENGINE_LIBRARIES", str(tmp_path))
    with pytest.raises(LibraryError) as caught:
        library.find_directory()
    assert str(tmp_path) in str(caught.value)
    assert library.library_file("ggml-base") in str(caught.value)


# ---- opening and checking


def test_a_file_that_is_no_library_is_a_library_error(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"cannot open .*Reinstall llama-cpp-python==0\.3\.36"):
        library._open(place_dummies(tmp_path / "broken"))


def fake_libraries(directory: Path, body: str) -> Path:
    """Three libraries of the right names, compiled from one C text."""
    directory.mkdir()
    source = directory / "fake.c"
    source.write_text(f"#include <stddef.h>\n{body}\n")
    for name in NAMES:
        target = directory / library.library_file(name)
        subprocess.run([c_headers.compiler(), "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return directory


VERSION = 'const char * ggml_version(void) { return "%s"; }\n'
OVERHEAD = "size_t ggml_tensor_overhead(void) { return %d; }\n"


@pytest.mark.parametrize("version", ["0.25.2", "0.26.0", "", "0.25.3-dirty"])
def test_a_version_that_was_not_checked_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(LibraryError, match=rf"holds ggml {version}, checked are 0\.25\.3.*pip install"):
        library._open(fake_libraries(tmp_path / "fake", VERSION % version + OVERHEAD % 368))


def test_a_ggml_without_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"a ggml without a version.*pip install"):
        library._open(fake_libraries(tmp_path / "fake", "int something;"))


@pytest.mark.parametrize("n_bytes", [360, 376, 0])
def test_a_tensor_of_another_size_is_refused(tmp_path: Path, n_bytes: int) -> None:
    with pytest.raises(LibraryError, match=rf"takes {n_bytes} bytes, ours 368.*pip install"):
        library._open(fake_libraries(tmp_path / "fake", VERSION % "0.25.3" + OVERHEAD % n_bytes))


def test_the_checked_version_and_size_are_taken(tmp_path: Path) -> None:
    directory = fake_libraries(tmp_path / "fake", VERSION % "0.25.3" + OVERHEAD % 368)
    assert library._open(directory).version == "0.25.3"


def test_the_override_is_what_load_opens(tmp_path: Path) -> None:
    fake = fake_libraries(tmp_path / "fake", VERSION % "9.9.9" + OVERHEAD % 368)
    done = run("from ggml_engine.ggml import library; library.load()", GGML_ENGINE_LIBRARIES=str(fake))
    assert "LibraryError" in done.stderr
    assert "holds ggml 9.9.9" in done.stderr


def test_a_failed_load_can_be_tried_again(tmp_path: Path) -> None:
    code = """
import os
from ggml_engine.errors import LibraryError
from ggml_engine.ggml import library
try:
    library.load()
except LibraryError:
    del os.environ["GGML_ENGINE_LIBRARIES"]
print(library.load().version)
"""
    fake = fake_libraries(tmp_path / "fake", "int something;")
    done = run(code, GGML_ENGINE_LIBRARIES=str(fake))
    assert done.stdout == "0.25.3\n", done.stderr


def test_loading_gives_one_set_of_libraries() -> None:
    libraries = library.load()
    assert library.load() is libraries
    assert libraries.version in library.CHECKED_VERSIONS
    assert libraries.registry.ggml_backend_dev_count() >= 1


def test_eight_threads_may_load_at_once() -> None:
    code = """
import threading
from ggml_engine.ggml import library
opened, found = [], []
real = library._open
library._open = lambda directory: opened.append(1) or real(directory)
gate = threading.Barrier(8)
def work():
    gate.wait()
    found.append(library.load())
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(opened), len(found), len({id(one) for one in found}))
"""
    done = run(code)
    assert (done.stdout, done.stderr) == ("1 8 1\n", "")


def test_the_backtrace_that_would_start_a_debugger_is_off() -> None:
    done = run(
        "from ggml_engine.ggml import library; library.load(); import os; print(os.environ['GGML_NO_BACKTRACE'])"
    )
    assert done.stdout == "1\n"
    done = run(
        "from ggml_engine.ggml import library; library.load(); import os; print(os.environ['GGML_NO_BACKTRACE'])",
        GGML_NO_BACKTRACE="0",
    )
    assert done.stdout == "0\n", "what the user has set stays"


# ---- logs


def spoken(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "ggml_engine.native"]


def say(level: int, text: str) -> None:
    library._on_log(level, ffi.new("char[]", text.encode()), ffi.NULL)


def test_native_lines_reach_the_logger_with_their_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ggml_engine.native")
    for level, text in ((1, "detail"), (2, "chatter"), (3, "trouble"), (4, "failure")):
        say(level, text + "\n")
    assert spoken(caplog) == [
        (logging.DEBUG, "detail"),
        (logging.DEBUG, "chatter"),
        (logging.WARNING, "trouble"),
        (logging.ERROR, "failure"),
    ]


def test_pieces_of_a_line_are_joined_under_the_first_ones_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ggml_engine.native")
    for level, text in ((3, "loading "), (5, "."), (5, "."), (5, " done\n"), (4, "then\n")):
        say(level, text)
    assert spoken(caplog) == [(logging.WARNING, "loading .. done"), (logging.ERROR, "then")]


def test_a_new_line_ends_an_unfinished_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ggml_engine.native")
    say(3, "no end")
    say(4, "next\n")
    say(5, "\n")
    assert spoken(caplog) == [(logging.WARNING, "no end"), (logging.ERROR, "next")]


def test_text_that_is_no_utf8_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    library._on_log(4, ffi.new("char[]", b"bad \xff byte\n"), ffi.NULL)
    assert spoken(caplog) == [(logging.ERROR, "bad \ufffd byte")]


@pytest.mark.skipif(not has_compiler(), reason="the filter is compiled")
def test_lines_that_the_logs_level_hides_do_not_come_to_python(caplog: pytest.LogCaptureFixture) -> None:
    came: list[tuple[int, str]] = []
    from ggml_engine.native import _kernels as native

    @ffi.callback("ggml_log_callback")  # type: ignore[untyped-decorator]
    def come(level: int, text: Any, _user_data: Any) -> None:
        came.append((level, ffi.string(text).decode()))

    lines = [(2, "chatter "), (5, "and more\n"), (3, "trouble "), (5, "and more\n"), (1, "detail\n"), (4, "failure\n")]

    def shown(least: int) -> list[tuple[int, str]]:
        came.clear()
        filtered = ffi.cast("ggml_log_callback", native.filter_log(least, int(ffi.cast("uintptr_t", come))))
        for level, text in lines:
            filtered(level, ffi.new("char[]", text.encode()), ffi.NULL)
        return list(came)

    try:
        assert shown(1) == lines
        assert shown(3) == [lines[2], lines[3], lines[5]]
    finally:
        library.load()
    # and the level is the log's: as it is at the latest `load`
    filtered = library._log_callback()
    warned = ["trouble and more", "failure"]
    for level, expected in (
        (logging.WARNING, warned),
        (logging.DEBUG, ["chatter and more", warned[0], "detail", warned[1]]),
    ):
        caplog.clear()
        caplog.set_level(level, "ggml_engine.native")
        library.load()
        for each, text in lines:
            filtered(each, ffi.new("char[]", text.encode()), ffi.NULL)
        assert [text for _, text in spoken(caplog)] == expected


def test_lines_of_libllama_itself_reach_the_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ggml_engine.native")
    llama = library.load().llama
    llama.llama_log_set(library._on_log, ffi.NULL)  # another test may have imported llama_cpp, which sets its own
    params = llama.llama_model_default_params()
    assert llama.llama_model_load_from_file(os.fsencode(tmp_path / "missing.gguf"), params) == ffi.NULL
    assert any(level == logging.ERROR and "missing.gguf" in text for level, text in spoken(caplog))


def test_lines_of_several_threads_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ggml_engine.native")

    def speak(name: str) -> None:
        for i in range(50):
            say(3, f"{name} {i}\n")

    threads = [threading.Thread(target=speak, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(text for _, text in spoken(caplog)) == sorted(f"{name} {i}" for name in "abcd" for i in range(50))


# ---- aborts

ABORT = """
import logging
import raw_probe
handler = logging.FileHandler({log!r})
logging.getLogger("ggml_engine.native").addHandler(handler)
raw_probe.PROBES["get_rows at the number of rows"](raw_probe.Raw())
"""


def test_an_abort_inside_of_a_graph_names_the_graph_and_dies_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    before = time.monotonic()
    done = run(ABORT.format(log=str(log)))
    took_s = time.monotonic() - before
    assert done.returncode == -signal.SIGABRT
    assert "ggml-engine: ggml aborts the process while running the probe: " in done.stderr
    assert "GGML_ASSERT(i01 >= 0 && i01 < ne01)" in done.stderr
    assert "ggml aborts the process while running the probe: " in log.read_text()
    assert took_s < 2


def test_an_abort_outside_of_a_graph_says_so() -> None:
    done = run("import raw_probe; raw_probe.PROBES['reshape to another size'](raw_probe.Raw())")
    assert done.returncode == -signal.SIGABRT
    assert "while running no graph: " in done.stderr


def test_the_running_graph_is_named_inside_out() -> None:
    with library.running_graph("outer"):
        with library.running_graph("inner"):
            assert library._running == "inner"
        assert library._running == "outer"
    assert library._running == ""
    with pytest.raises(RuntimeError), library.running_graph("failing"):
        raise RuntimeError
    assert library._running == ""


# ---- the end

EXITS = {
    "only imported": "from ggml_engine.ggml import backends, library, ops",
    "loaded": "from ggml_engine.ggml import library; library.load()",
    "loaded, then llama_cpp imported": "from ggml_engine.ggml import library; library.load(); import llama_cpp",
    "llama_cpp imported, then loaded": "import llama_cpp; from ggml_engine.ggml import library; library.load()",
    "a backend alive": """
from ggml_engine.ggml import backends, library
libraries = library.load()
backend = backends.Backend(libraries, backends.cpu_device(libraries), 2)
""",
    "a graph alive": """
import numpy as np
from graphs import Bench
from ggml_engine.ggml import backends
bench = Bench()
a = bench.input(np.ones(4))
y = bench.builder.output(bench.builder.tanh(a), "y")
backend = backends.Backend(bench.libraries, backends.cpu_device(bench.libraries), 2)
graph = backends.Graph(bench.builder, [backend], "alive")
backends.set_data(bench.libraries, a, np.ones(4, np.float32))
graph.compute()
""",
    "a graph in a cycle": """
import numpy as np
from graphs import Bench
from ggml_engine.ggml import backends
bench = Bench()
y = bench.builder.output(bench.builder.tanh(bench.input(np.ones(4))), "y")
backend = backends.Backend(bench.libraries, backends.cpu_device(bench.libraries), 2)
graph = backends.Graph(bench.builder, [backend], "alive")
graph.itself = [graph]
del graph, backend
""",
    "a thread alive that used it": """
import threading
from ggml_engine.ggml import backends, library
threading.Thread(target=lambda: backends.Backend(library.load(), backends.cpu_device(library.load()), 2)).start()
""",
    "an exception": """
from ggml_engine.ggml import backends, library
libraries = library.load()
backend = backends.Backend(libraries, backends.cpu_device(libraries), 2)
raise SystemExit(0)
""",
}


@pytest.mark.parametrize("name", EXITS)
def test_the_process_ends_silently(name: str) -> None:
    done = run(EXITS[name])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


NATIVE = "[name for name in sys.modules if name in ('cffi', '_cffi_backend', 'llama_cpp', 'ggml_engine.ggml.library')]"


@pytest.mark.parametrize("module", ["ggml_engine", "ggml_engine.errors", "ggml_engine.pool"])
def test_the_light_modules_load_nothing_native(module: str) -> None:
    done = run(f"import sys, {module}; print({NATIVE})")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_importing_the_native_modules_opens_no_library_yet() -> None:
    code = "from ggml_engine.ggml import backends, library, ops; print(library._loaded)"
    assert run(code).stdout == "None\n"


def test_a_build_whose_backends_are_separate_files_has_them_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def nothing(*_: Any) -> None:
        return None

    registry = SimpleNamespace(ggml_backend_dev_count=lambda: 0, ggml_backend_load_all_from_path=asked.append)
    fake = library.Libraries(
        SimpleNamespace(ggml_set_abort_callback=nothing),
        registry,
        SimpleNamespace(llama_log_set=nothing),
        Path("somewhere"),
        "0",
    )
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "_open", lambda _: fake)
    monkeypatch.setattr(library.atexit, "register", nothing)
    assert library.load() is fake
    assert asked == [b"somewhere"]
