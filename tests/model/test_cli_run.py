"""`ggml-engine run` on a real model, in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_process import TIMEOUT_S, environment, run, started, terminal
from real_models import gemma3_270m, smollm2

S = str(smollm2())
# one thread: several spin, and slow each other down where the machine is busy
GREEDY = ("--greedy", "--threads", "1")
STATISTICS = re.compile(
    r"engine native: there is a graph for '\w+' models\r?\n"
    r"prompt (\d+) tokens \((\d+) reused\) \| generated (\d+) \| first token (?:[\d.]+ s|none) \| prefill [\d.]+ tokens/s"
    r" \| decode [\d.]+ tokens/s \| cells (\d+)/(\d+) \| K/V [\d.]+ of [\d.]+ MiB\n"
)


def lines(data: bytes) -> list[str]:
    return data.decode().splitlines()


def test_the_answer_is_all_of_stdout_and_the_statistics_all_of_stderr() -> None:
    done = run("run", S, "Name a colour.", *GREEDY, "-n", "12", "--json")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    streamed = run("run", "smollm2", "Name a colour.", *GREEDY, "-n", "12")
    assert streamed.returncode == 0
    assert streamed.stdout.decode() == result["text"] + "\n"
    assert len(result["text"]) > 3
    for stderr in (done.stderr, streamed.stderr):
        match = STATISTICS.fullmatch(stderr.decode())
        assert match is not None, stderr
        n_prompt, n_reused, n_generated, n_cells, capacity = map(int, match.groups())
        assert (n_reused, capacity) == (0, 8192)
        assert n_generated == len(result["tokens"]) == 12
        assert n_cells == n_prompt + n_generated - 1  # the last token is sampled, not committed
    assert result["reason"] == "length"
    assert result["stats"]["prompt_tokens"] == result["stats"]["evaluated_tokens"] == n_prompt
    assert result["stats"]["kv_capacity_bytes"] == 8192 * 22.5 * 1024
    assert result["model"]["architecture"] == "llama"
    assert Path(result["model"]["path"]) == smollm2()


def test_a_prompt_from_stdin_from_a_file_and_from_the_argument_give_the_same(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Name a colour.\n")
    options = (*GREEDY, "-n", "8", "--quiet")
    by_argument = run("run", S, "Name a colour.", *options)
    assert by_argument.returncode == 0
    assert by_argument.stderr == b""
    assert run("run", S, *options, stdin=b"Name a colour.\n").stdout == by_argument.stdout
    assert run("run", S, "-f", str(file), *options).stdout == by_argument.stdout
    assert run("run", S, "-f", "-", *options, stdin=b"Name a colour.").stdout == by_argument.stdout


def test_the_seed_that_json_tells_gives_the_same_text_again() -> None:
    options = ("--threads", "1", "-n", "12", "--temperature", "1.5", "--json")
    first = json.loads(run("run", S, "Name a colour.", *options).stdout)
    again = json.loads(run("run", S, "Name a colour.", *options, "--seed", str(first["options"]["seed"])).stdout)
    other = json.loads(run("run", S, "Name a colour.", *options).stdout)
    assert again["tokens"] == first["tokens"]
    assert other["options"]["seed"] != first["options"]["seed"]


def test_a_schema_is_followed() -> None:
    schema = (
        '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false}'
    )
    done = run("run", S, "Give a number in JSON.", *GREEDY, "-n", "40", "--json-schema", schema)
    assert done.returncode == 0
    assert type(json.loads(done.stdout)["n"]) is int


def test_k_and_v_in_f32_and_flash_attention_run() -> None:
    done = run("run", S, "Name a colour.", *GREEDY, "-n", "4", "--kv-type", "f32", "--attention", "flash", "--no-mmap")
    assert done.returncode == 0
    assert len(done.stdout) > 3


def test_a_stop_text_ends_it_and_is_not_shown() -> None:
    done = run("run", S, "-f", "-", *GREEDY, "--raw", "-n", "30", "--stop", "4", "--json", stdin=b"1 2 3 4 5 6 1 2 3")
    result = json.loads(done.stdout)
    assert result["reason"] == "stop"
    assert "4" not in result["text"]


@pytest.mark.parametrize("special", [False, True])
def test_control_tokens_in_a_raw_prompt_are_text_unless_asked_for(special: bool) -> None:
    args = ["run", S, "<|im_start|>", *GREEDY, "--raw", "-n", "1", "--json", *(["--parse-special"] if special else [])]
    n_tokens = json.loads(run(*args).stdout)["stats"]["prompt_tokens"]
    assert n_tokens == 1 if special else n_tokens > 1


# ---- errors


def test_a_missing_file_is_one_line_and_code_1() -> None:
    done = run("run", "/no/such/model.gguf", "hello")
    assert (done.returncode, done.stdout) == (1, b"")
    assert lines(done.stderr) == [
        "ggml-engine: error: there is no file '/no/such/model.gguf', and no model of that name "
        "(known: smollm2, gemma3-270m)"
    ]


def test_a_truncated_file_is_one_line_that_names_the_place_and_code_1(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(smollm2().read_bytes()[:1000])
    done = run("run", str(file), "hello")
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = lines(done.stderr)
    assert line.startswith(f"ggml-engine: error: {file}: ")
    assert re.search(r"at byte \d+\)$", line)
    assert "Traceback" in run("run", str(file), "hello", "--debug").stderr.decode()


def test_a_directory_is_no_model(tmp_path: Path) -> None:
    done = run("run", str(tmp_path), "hello")
    assert done.returncode == 1
    assert len(lines(done.stderr)) == 1


def test_a_base_model_is_told_to_be_used_raw_and_raw_works() -> None:
    done = run("run", "gemma3-270m", "hello", "--threads", "1")
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = lines(done.stderr)
    assert line.startswith("ggml-engine: error: ")
    assert "chat template" in line
    assert "--raw" in line
    raw = run("run", str(gemma3_270m()), "The capital of France is", *GREEDY, "--raw", "-n", "4")
    assert raw.returncode == 0
    assert len(raw.stdout.strip()) > 3
    assert STATISTICS.fullmatch(raw.stderr.decode())


def test_bad_values_are_code_2_before_anything_is_loaded() -> None:
    done = run("run", "/no/such/model.gguf", "hello", "--temperature", "-1")
    assert (done.returncode, done.stdout) == (2, b"")
    assert "--temperature" in lines(done.stderr)[-1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--device", "nonesuch"], ["nonesuch", "CPU"]),
        (["--ctx", "1000000000"], ["1000000000 cells"]),
        (["--grammar", "root ::= ("], ["grammar"]),
        (["--json-schema", "{"], ["schema"]),
        (["--logit-bias", "49999=1"], ["49999"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_only_the_engine_can_refuse_is_one_line_and_code_1(args: list[str], words: list[str]) -> None:
    done = run("run", S, "hello", "--threads", "1", *args)
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = lines(done.stderr)
    assert all(word in line for word in words)


def test_a_prompt_that_does_not_fit_is_refused_with_both_counts() -> None:
    done = run("run", S, "word " * 200, *GREEDY, "--ctx", "64")
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = lines(done.stderr)
    match = re.search(r"needs (\d+) tokens, the context holds 64", line)
    assert match is not None
    assert int(match[1]) > 200


def test_a_full_context_ends_with_the_reason_length() -> None:
    done = run("run", S, "Count.", *GREEDY, "--ctx", "64", "--ignore-eos", "--json")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert result["reason"] == "length"
    assert result["stats"]["cells_used"] == result["stats"]["cells_capacity"] == 64


# ---- streams


@pytest.mark.parametrize("encoding", ["ascii", "utf-16", "cp1252"])
def test_a_pipe_gets_utf_8_in_every_locale(tmp_path: Path, encoding: str) -> None:
    grammar = tmp_path / "emoji.gbnf"
    grammar.write_text('root ::= "né🎉漢"', encoding="utf-8")
    env = environment(LC_ALL="C", LANG="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", PYTHONIOENCODING=encoding)
    done = run("run", S, "Füße 🎉", *GREEDY, "--grammar-file", str(grammar), env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "né🎉漢\n".encode()


def test_a_terminal_that_cannot_show_a_character_gets_another_one(tmp_path: Path) -> None:
    grammar = tmp_path / "emoji.gbnf"
    grammar.write_text('root ::= "n🎉m"', encoding="utf-8")
    from cli_process import command

    with terminal() as ours:
        env = environment(PYTHONIOENCODING="ascii", LC_ALL="C")
        done = subprocess.run(
            command("run", S, "hello", *GREEDY, "--grammar-file", str(grammar)), stdin=subprocess.DEVNULL,
            stdout=ours.child_side, stderr=subprocess.PIPE, timeout=TIMEOUT_S, check=False, env=env,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        ours.read_until(rb"n\?m\r\n")


def test_a_reader_that_leaves_ends_the_run_quietly() -> None:
    with started("run", S, "Count.", *GREEDY, "--ignore-eos") as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert len(child.stdout.read(10)) == 10
        child.stdout.close()
        assert child.wait(TIMEOUT_S) == 141
        assert child.stderr.read() == b""


def test_ctrl_c_while_it_streams_ends_it_with_130_a_line_end_and_the_statistics() -> None:
    with started("run", S, "Count.", *GREEDY, "--ignore-eos") as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.read(1)
        begun = time.monotonic()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 130
        assert time.monotonic() - begun < 10.0  # typically 0.2 s; the context would take minutes
        assert out.endswith(b"\n")
        assert STATISTICS.fullmatch(err.decode()), err


def test_ctrl_c_in_a_long_prompt_ends_it_before_the_next_step_and_bars_stay_on_the_terminal() -> None:
    with terminal() as ours, started(
        "run", S, "word " * 3000, "--threads", "1", "--batch-tokens", "32", "--json", stderr=ours.child_side
    ) as child:  # fmt: skip
        assert child.stdout is not None
        ours.read_until(rb"loading \[#+\] 100% of [\d.]+ MiB")
        n_total = int(ours.read_until(rb"reading \[-+\]   0% of (\d+) tokens")[1])
        assert n_total > 3000
        n_seen = float(ours.read_until(rb"\[[#-]+\] +([1-9]\d*)% of")[1]) / 100 * n_total
        begun = time.monotonic()
        child.send_signal(signal.SIGINT)
        out = child.stdout.read()
        assert child.wait(TIMEOUT_S) == 130
        assert time.monotonic() - begun < 10.0  # typically 0.5 s; the whole prompt would take half a minute
        stats = json.loads(out)["stats"]
        assert json.loads(out)["reason"] == "cancelled"
        assert stats["generated_tokens"] == 0
        assert n_seen - 32 <= stats["evaluated_tokens"] < n_total / 2
        ours.read_until(rb"prompt \d+ tokens \(0 reused\) \| generated 0 \| first token none")


def test_devices_and_version_work_on_the_real_libraries() -> None:
    devices = run("devices")
    assert devices.returncode == 0
    assert re.search(rb"^CPU +cpu ", devices.stdout, re.MULTILINE)
    assert json.loads(run("devices", "--json").stdout)[-1]["memory_total"] > 0
    assert re.fullmatch(rb"ggml-engine \S.*, ggml [\d.]+, llama-cpp-python [\d.]+\n", run("--version").stdout)


def test_libllamas_engine_gives_the_same_answer_and_says_what_it_is() -> None:
    asked = ("run", S, "Name a colour.", *GREEDY, "-n", "12", "--attention", "matmul", "--json")
    native, libllama = run(*asked), run(*asked, "--engine", "llama", "--ctx", "512")
    assert (native.returncode, libllama.returncode) == (0, 0), libllama.stderr
    results = [json.loads(native.stdout), json.loads(libllama.stdout)]
    assert results[0]["text"] == results[1]["text"]
    assert results[0]["tokens"] == results[1]["tokens"]
    assert [result["model"]["engine"] for result in results] == ["native", "llama"]
    (line,) = lines(libllama.stderr)  # it was asked for by name
    assert re.search(r"^prompt .* \| cells \d+/512 \| K/V 11\.2 of 11\.2 MiB$", line), line
