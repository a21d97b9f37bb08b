"""`ggml-engine run` with an engine that is none: prompts, streams, exit codes."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

import ggml_engine.cli.run as run_module
from ggml_engine.cli.main import main
from ggml_engine.errors import ComputeError, ContextLengthError, GGUFError, OptionError

ENGINE_LINE = "engine native: there is a graph for 'llama' models\n"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(run_module, "load_engine", engine.load)
    return engine


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, *, terminal: bool = False) -> None:
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="ascii")
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", stream)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_text_goes_to_stdout_with_one_line_end_and_the_statistics_to_stderr(engine, capsys) -> None:
    assert main(["run", "some.gguf", "hello"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello there\n"
    assert err == (
        f"{ENGINE_LINE}prompt 7 tokens (2 reused) | generated 2 | first token 0.12 s | prefill 10.0 tokens/s | "
        "decode 20.0 tokens/s | cells 9/64 | K/V 3.0 of 12.0 MiB\n"
    )
    assert engine.asked == [("load", "some.gguf"), ("chat", [user("hello")])]
    assert engine.closed


def test_a_quiet_run_leaves_stderr_empty(engine, capsys) -> None:
    assert main(["run", "m", "hello", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_system_message_comes_first(engine) -> None:
    assert main(["run", "m", "hello", "--system", "Be brief."]) == 0
    assert engine.asked[-1] == ("chat", [{"role": "system", "content": "Be brief."}, user("hello")])


@pytest.mark.parametrize("special", [False, True])
def test_a_raw_prompt_takes_no_template(engine, special: bool) -> None:
    engine.has_template = False
    assert main(["run", "m", "Once upon", "--raw", *(["--parse-special"] if special else [])]) == 0
    assert engine.asked[-1] == ("generate", ("Once upon", special))


def test_a_model_without_a_template_is_an_error_that_names_raw(engine, capsys) -> None:
    engine.has_template = False
    assert main(["run", "m", "hello"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "ggml-engine: error: fake.gguf has no chat template (use --raw)\n"
    assert engine.closed


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"hello", "hello"),
        (b"hello\n", "hello"),
        (b"hello\r\n", "hello"),
        (b"hello\n\n", "hello\n"),
        (b"  a\nb ", "  a\nb "),
        (b"\xef\xbb\xbfhello", "hello"),
        ("grüße 🎉".encode(), "grüße 🎉"),
    ],
)
def test_a_prompt_is_read_from_stdin_or_a_file_but_for_its_last_line_end(
    monkeypatch, engine, tmp_path: Path, data: bytes, prompt: str
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    for args, stdin in (([], data), (["-f", "-"], data), (["-f", str(file)], b"other")):
        give_stdin(monkeypatch, stdin)
        assert main(["run", "m", *args]) == 0
        assert engine.asked[-1] == ("chat", [user(prompt)])


def test_an_argument_goes_before_a_stdin_that_is_no_terminal(monkeypatch, engine) -> None:
    give_stdin(monkeypatch, b"other")
    assert main(["run", "m", "hello"]) == 0
    assert engine.asked[-1] == ("chat", [user("hello")])


@pytest.mark.parametrize("args", [["run"], ["run", "m"], ["run", "m", "-f", "-"], ["run", "m", "--raw"], ["nonsense"]])
def test_without_model_or_prompt_or_with_an_unknown_command_it_is_a_usage_error(
    monkeypatch, capsys, args: list[str]
) -> None:
    monkeypatch.setattr(run_module, "load_engine", pytest.fail)
    give_stdin(monkeypatch, b"")
    assert main(args) == 2
    assert "Error: " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--raw", "--json"])
def test_on_a_terminal_an_option_that_needs_a_prompt_is_a_usage_error_without_one(monkeypatch, capsys, option) -> None:
    monkeypatch.setattr(run_module, "load_engine", pytest.fail)
    give_stdin(monkeypatch, b"", terminal=True)
    assert main(["run", "m", option]) == 2
    assert option in capsys.readouterr().err.splitlines()[-1]


def test_a_closed_stdin_is_no_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", "m"]) == 2


def test_a_prompt_that_is_not_utf_8_is_an_error_with_the_place(monkeypatch, capsys) -> None:
    give_stdin(monkeypatch, b"ab\xff")
    assert main(["run", "m"]) == 1
    assert capsys.readouterr().err == "ggml-engine: error: standard input is not UTF-8: byte 2 is 0xff\n"


def test_an_endless_prompt_is_refused(monkeypatch, capsys) -> None:
    from ggml_engine.cli import text_input

    monkeypatch.setattr(text_input, "MAX_BYTES", 10)
    give_stdin(monkeypatch, b"x" * 11)
    assert main(["run", "m"]) == 1
    assert "more than 10 bytes" in capsys.readouterr().err


def test_json_is_one_object_with_everything_and_the_seed_in_use(engine, capsys) -> None:
    engine.pieces = ["é🎉", "\n"]
    assert main(["run", "m", "hello", "--json", "--logit-bias", "5=-inf", "--system", "s", "--top-k", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.isascii()
    assert out.endswith("}\n")
    result = json.loads(out)
    assert (result["text"], result["tokens"], result["reason"]) == ("é🎉\n", [0, 1], "finished")
    assert result["model"] == {
        "path": "fake.gguf", "name": "Fake", "architecture": "llama", "engine": "native",
    }  # fmt: skip
    assert result["stats"]["prompt_tokens"] == 7
    assert result["stats"]["kv_capacity_bytes"] == 12 << 20
    assert result["stats"]["load_s"] >= 0
    options = result["options"]
    assert options["seed"] == engine.config.sampler.seed
    assert type(options["seed"]) is int
    assert (options["top_k"], options["logit_bias"], options["system"], options["raw"]) == (
        3,
        {"5": "-inf"},
        "s",
        False,
    )
    assert set(options) >= {"ctx", "threads", "kv_type", "max_tokens", "stop", "grammar", "parse_special"}
    assert err.startswith(f"{ENGINE_LINE}prompt 7 tokens")


ERRORS: list[tuple[BaseException, str]] = [
    (GGUFError("truncated", "x.gguf", 12, "key", "is cut\noff"), "x.gguf: is cut off (truncated: key at byte 12)"),
    (ContextLengthError(90, 64), "the prompt needs 90 tokens, the context holds 64"),
    (ComputeError("\x1b[2Jevil"), "\\x1b[2Jevil"),
    (OptionError("no"), "no"),
    (MemoryError(), "out of memory"),
    (FileNotFoundError(2, "No such file or directory", "p.txt"), "p.txt: No such file or directory"),
    (OSError("odd"), "odd"),
]


@pytest.mark.parametrize(("error", "line"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
def test_an_error_is_one_line_and_code_1_and_with_debug_a_traceback_too(monkeypatch, capsys, error, line) -> None:
    def fail(*_args: Any, **_options: Any) -> None:
        raise error

    monkeypatch.setattr(run_module, "load_engine", fail)
    assert main(["run", "m", "hello"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"ggml-engine: error: {line}\n"
    assert main(["run", "m", "hello", "--debug"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith(f"ggml-engine: error: {line}\n")


def test_an_error_in_the_middle_keeps_the_text_before_it(engine, capsys) -> None:
    def fail() -> None:
        raise ComputeError("it broke")

    engine.pieces = ["Hel", fail]
    assert main(["run", "m", "hello"]) == 1
    out, err = capsys.readouterr()
    assert out == "Hel"
    assert err == "ggml-engine: error: it broke\n"


def test_a_bug_keeps_its_traceback(engine) -> None:
    def fail() -> None:
        raise KeyError("bug")

    engine.pieces = [fail]
    with pytest.raises(KeyError):
        main(["run", "m", "hello"])


def test_ctrl_c_stops_the_generation_prints_the_statistics_and_gives_130(engine, capsys) -> None:
    before = signal.getsignal(signal.SIGINT)
    engine.pieces = ["Hel", lambda: signal.raise_signal(signal.SIGINT), "never"]
    assert main(["run", "m", "hello"]) == 130
    out, err = capsys.readouterr()
    assert out == "Hel\n"
    assert err.startswith(f"{ENGINE_LINE}prompt 7 tokens")
    assert err.count("\n") == 2
    assert engine.closed
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_loading_asks_the_loader_to_stop(monkeypatch, capsys) -> None:
    from ggml_engine.errors import CancelledError

    def load(_model: str, *, cancel: Any, **_options: Any) -> None:
        assert not cancel()
        signal.raise_signal(signal.SIGINT)
        assert cancel()
        raise CancelledError("loading was cancelled")

    monkeypatch.setattr(run_module, "load_engine", load)
    assert main(["run", "m", "hello"]) == 130
    assert capsys.readouterr() == ("", "\n")


def test_a_second_ctrl_c_does_not_wait(engine, capsys) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("still running")

    engine.pieces = ["Hel", twice]
    assert main(["run", "m", "hello"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it(engine, capsys) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine.pieces = ["Hel", lambda: signal.raise_signal(signal.SIGINT), "lo"]
        assert main(["run", "m", "hello"]) == 0
        assert capsys.readouterr().out == "Hello\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_reader_that_has_gone_ends_it_quietly(engine, monkeypatch, capsys) -> None:
    class Gone(io.BytesIO):
        def write(self, _data: object) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Gone(), encoding="utf-8", write_through=True))
    assert main(["run", "m", "hello"]) == 141
    assert capsys.readouterr().err == ""
    assert engine.closed


def test_a_full_disk_is_one_line_and_code_1(engine, monkeypatch, capsys) -> None:
    class Full(io.BytesIO):
        def write(self, _data: object) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Full(), encoding="utf-8", write_through=True))
    assert main(["run", "m", "hello"]) == 1
    assert capsys.readouterr().err == "ggml-engine: error: No space left on device\n"


def test_a_closed_stdout_is_no_error(engine, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["run", "m", "hello"]) == 0


@pytest.mark.parametrize("wanted", ["native", "llama"])
def test_an_engine_that_was_asked_for_by_name_is_not_told_again(engine, capsys, wanted: str) -> None:
    assert main(["run", "m", "hello", "--engine", wanted]) == 0
    assert engine.load_options["engine"] == wanted
    assert capsys.readouterr().err.startswith("prompt 7 tokens")
