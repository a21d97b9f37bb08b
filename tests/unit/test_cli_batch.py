"""`ggml-engine batch` over an executor without a model: what goes where, what is reserved, exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_batch_engine import FakeBatchEngine
from fake_executor import Forward

import ggml_engine.cli.batch_output as output_module
import ggml_engine.cli.run as run_module
from ggml_engine.cli.main import main
from ggml_engine.errors import GGUFError

GREEDY = ("--greedy", "-n", "4")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeBatchEngine:
    return use(monkeypatch, FakeBatchEngine())


def use(monkeypatch: pytest.MonkeyPatch, engine: FakeBatchEngine) -> FakeBatchEngine:
    monkeypatch.setattr(run_module, "load_engine", engine.load)
    return engine


def prompts_file(tmp_path: Path, *objects: dict[str, Any]) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, objects)) + "\n", encoding="utf-8")
    return str(file)


def report_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- texts


def test_one_prompt_is_all_of_stdout(engine, capsys) -> None:
    assert main(["batch", "m", "hello", *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert out == engine.answer("hello", 4) + "\n"
    assert err.splitlines()[1].split() == [
        "prompt", "round", "tokens", "evaluated", "reused", "generated", "first", "token", "total", "tokens/s", "end",
    ]  # fmt: skip
    assert len(err.splitlines()) == 4
    assert engine.closed


def test_texts_come_in_the_order_of_the_prompts_although_they_end_in_another(engine, tmp_path, capsys) -> None:
    file = prompts_file(
        tmp_path,
        {"prompt": "long", "max_tokens": 200},
        {"prompt": "short", "max_tokens": 1, "id": "s"},
        {"prompt": "mid"},
    )
    report = tmp_path / "report.jsonl"
    args = ["--prompts-file", file, *GREEDY, "--prompt-rounds", "2", "--report", str(report), "--quiet"]
    assert main(["batch", "m", *args]) == 0
    out, err = capsys.readouterr()
    texts = {
        "prompt 1": engine.answer("long", 200),
        "prompt 2 (s)": engine.answer("short", 1),
        "prompt 3": engine.answer("mid", 4),
    }
    wanted = [f"==> {name}, round {n} <==\n{text}\n" for n in (1, 2) for name, text in texts.items()]
    assert out == "\n".join(wanted)
    assert err == ""
    ended = [(row["round"], row["index"]) for row in report_of(report)]
    assert sorted(ended) == [(n, i) for n in (1, 2) for i in (1, 2, 3)]
    assert ended[0] == (1, 2), "the report is in the order of ends, and the shortest ends first"


def test_json_lines_hold_row_and_text_of_failures_too(engine, tmp_path, capsys) -> None:
    file = prompts_file(tmp_path, {"prompt": "a"}, {"messages": [{"role": "martian", "content": "b"}], "id": 7})
    assert main(["batch", "m", "--prompts-file", file, *GREEDY, "--json"]) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["index"], first["text"], first["reason"]) == (1, engine.answer("a", 4), "length")
    assert (second["index"], second["id"], second["text"], second["reason"]) == (2, 7, "", "failed")
    assert second["error"] == "the template refuses the role martian"


def test_files_hold_a_text_each_and_stdout_nothing(engine, tmp_path, capsys) -> None:
    prompts = [f"prompt {n}" for n in range(10)]
    assert main(["batch", "m", *prompts, *GREEDY, "--prompt-rounds", "2", "--out-prefix", str(tmp_path / "o")]) == 0
    assert capsys.readouterr().out == ""
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"o-{n:02}-{r}.txt" for n in range(1, 11) for r in (1, 2)]
    for n, prompt in enumerate(prompts, 1):
        for r in (1, 2):
            assert (tmp_path / f"o-{n:02}-{r}.txt").read_text(encoding="utf-8") == engine.answer(prompt, 4) + "\n"


@pytest.mark.parametrize("which", ["o-2-1.txt", "r"])
def test_what_is_there_is_replaced_only_when_asked_for_and_before_that_nothing_is_loaded(
    engine, tmp_path, capsys, which: str
) -> None:
    (tmp_path / which).write_text("mine")
    args = ["batch", "m", "a", "b", *GREEDY, "--out-prefix", str(tmp_path / "o"), "--report", str(tmp_path / "r")]
    assert main(args) == 1
    assert f"{tmp_path / which} is there already" in capsys.readouterr().err
    assert (tmp_path / which).read_text() == "mine"
    assert not engine.is_loaded
    assert main([*args, "--overwrite"]) == 0
    assert (tmp_path / "o-2-1.txt").read_text() == engine.answer("b", 4) + "\n"
    assert len(report_of(tmp_path / "r")) == 2


@pytest.mark.parametrize("option", ["--out-prefix", "--report"])
def test_a_directory_that_is_not_there_is_noticed_before_anything_is_loaded(engine, tmp_path, capsys, option) -> None:
    assert main(["batch", "m", "a", option, str(tmp_path / "no" / "x")]) == 1
    assert capsys.readouterr().err == f"ggml-engine: error: {tmp_path / 'no'}: No such file or directory\n"
    assert not engine.is_loaded


def test_a_file_that_cannot_be_finished_is_not_there(engine, tmp_path, capsys, monkeypatch) -> None:
    def full(_from: str, _to: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_module.os, "replace", full)
    assert main(["batch", "m", "a", *GREEDY, "--out-prefix", str(tmp_path / "o")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert engine.closed


# ---- the report and the table


def test_a_report_says_what_was_evaluated_reused_and_missed(engine, tmp_path, capsys) -> None:
    report = tmp_path / "r"
    args = ["--prefix-cache-entries", "2", "--prompt-rounds", "2", "--report", str(report)]
    assert main(["batch", "m", "abcdef", "xyz", "qr", *GREEDY, *args]) == 0
    rows = {(row["round"], row["index"]): row for row in report_of(report)}
    assert len(rows) == 6
    counts = {
        key: tuple(row[f"{name}_tokens"] for name in ("prompt", "evaluated", "reused")) for key, row in rows.items()
    }
    assert counts == {
        (1, 1): (7, 7, 0), (1, 2): (4, 4, 0), (1, 3): (3, 3, 0),
        (2, 1): (7, 1, 6), (2, 2): (4, 1, 3), (2, 3): (3, 2, 1),  # the third begins as the others do, and is not kept
    }  # fmt: skip
    assert rows[1, 1]["miss"] == "nothing reused: empty"
    assert rows[2, 1]["miss"] is None
    assert rows[2, 3]["miss"].startswith("the prompt differs from the nearest snapshot at token 1: ")
    for row in rows.values():
        assert (row["reason"], row["error"], row["generated_tokens"], row["restarts"]) == ("length", None, 4, 0)
        assert 0 <= row["queued_s"] <= row["queued_s"] + row["first_token_s"] <= row["total_s"]
        assert row["first_token_s"] >= row["prefill_s"] >= 0
        assert row["seed"] is None
    which, *lines = capsys.readouterr().err.splitlines()
    assert which == "engine native: there is a graph for 'llama' models"
    assert [line.split()[:6] for line in lines[1:7]] == [
        [str(i), str(r), *map(str, counts[r, i]), "4"] for r in (1, 2) for i in (1, 2, 3)
    ]
    assert lines[7].split()[:5] == ["all", "28", "18", "10", "24"]
    assert {line.index("length") for line in lines[1:7]} == {lines[0].index("end")}
    assert lines[7].rindex(".") == lines[0].rindex("tokens/s") + 6, "numbers end where their column does"


def test_a_line_of_the_report_is_in_the_file_before_the_next_prompt_ends(engine, tmp_path) -> None:
    report = tmp_path / "r"
    seen: list[int] = []
    written = output_module.Report.write

    def write(self: Any, values: dict[str, Any]) -> None:
        seen.append(len(report_of(report)))
        written(self, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_module.Report, "write", write)
        assert main(["batch", "m", "a", "b", "c", *GREEDY, "--report", str(report)]) == 0
    assert seen == [0, 1, 2]
    assert len(report_of(report)) == 3


def test_a_report_may_be_a_pipe(engine, tmp_path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main(["batch", "m", "a", *GREEDY, "--report", str(path)]) == 0
        assert json.loads(os.read(reader, 65536))["index"] == 1
    finally:
        os.close(reader)


# ---- seeds


def test_without_a_seed_one_is_drawn_told_and_the_same_for_all(engine, tmp_path, monkeypatch, capsys) -> None:
    report = tmp_path / "r"
    args = ["a", "a", "-n", "6", "--temperature", "2", "--report", str(report), "--overwrite", "--json"]
    assert main(["batch", "m", *args]) == 0
    first = report_of(report)
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert texts[0] == texts[1]
    seeds = {row["seed"] for row in first}
    assert len(seeds) == 1
    (seed,) = seeds
    assert type(seed) is int
    use(monkeypatch, FakeBatchEngine())
    assert main(["batch", "m", *args, "--seed", str(seed)]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == texts
    use(monkeypatch, FakeBatchEngine())
    assert main(["batch", "m", *args]) == 0
    assert report_of(report)[0]["seed"] != seed


def test_an_object_has_its_own_seed_and_temperature(engine, tmp_path) -> None:
    file = prompts_file(
        tmp_path, {"prompt": "a", "seed": 4, "temperature": 1}, {"prompt": "a"}, {"prompt": "a", "temperature": 1}
    )
    assert main(["batch", "m", "--prompts-file", file, *GREEDY, "--seed", "11", "--report", str(tmp_path / "r")]) == 0
    assert {row["index"]: row["seed"] for row in report_of(tmp_path / "r")} == {1: 4, 2: None, 3: 11}


# ---- what is asked of the engine


@pytest.mark.parametrize(("n_prompts", "n_entries", "reserved"), [(1, 63, 3), (4, 2, 8), (3, 0, 3)])
def test_what_can_be_retained_is_reserved(engine, n_prompts: int, n_entries: int, reserved: int) -> None:  # R51
    args = ["--prefix-cache-entries", str(n_entries), "--prompt-rounds", "2"]
    assert main(["batch", "m", *"abcd"[:n_prompts], *GREEDY, *args]) == 0
    assert engine.runner_options.max_sessions == reserved


def test_options_reach_the_runner_and_the_engine(engine) -> None:
    decoding: list[int] = []

    def note(forward: Forward) -> None:
        decoding.append(sum(chunk.start >= 2 for chunk in forward.chunks))

    engine.fake.on_forward = note
    args = ["--max-decode-sequences", "2", "--max-batch-tokens", "32", "--threads", "3", "-n", "60"]
    assert main(["batch", "m", *"abcde", *GREEDY, *args]) == 0
    assert max(decoding) == 2
    assert engine.runner_options.max_decode_sequences == 2
    assert (engine.load_options["max_batch_tokens"], engine.load_options["threads"]) == (32, 3)


def test_prompts_are_chats_with_the_system_message_or_texts(engine, monkeypatch, capsys) -> None:
    assert main(["batch", "m", "a", *GREEDY, "--system", "s"]) == 0
    assert engine.asked == [[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]]
    for special in (False, True):
        raw = use(monkeypatch, FakeBatchEngine(has_template=False))
        assert main(["batch", "m", "a", *GREEDY, "--raw", *(["--parse-special"] if special else [])]) == 0
        assert raw.asked == [("a", special)]
    use(monkeypatch, FakeBatchEngine(has_template=False))
    assert main(["batch", "m", "a", *GREEDY]) == 1
    assert capsys.readouterr().err.endswith("ggml-engine: error: fake.gguf has no chat template (use --raw)\n")


def test_prompts_come_from_stdin_when_asked_for(engine, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"prompt": "b"}\n'), "ascii"))
    assert main(["batch", "m", "--prompts-file", "-", *GREEDY]) == 0
    assert [messages[0]["content"] for messages in engine.asked] == ["a", "b"]


def test_with_one_sequence_prompts_run_one_after_the_other(monkeypatch, capsys) -> None:
    engine = use(monkeypatch, FakeBatchEngine(clones=False))
    n_open: list[int] = []
    engine.fake.on_forward = lambda _forward: n_open.append(engine.fake.n_opened - engine.fake.n_closed)
    assert main(["batch", "m", "a", "b", "c", *GREEDY, "--cache-kind", "sequence", "--prompt-rounds", "2"]) == 0
    assert set(n_open) == {1}
    assert engine.fake.n_opened == 6
    assert engine.load_options["cache_kind"] == "sequence"
    assert capsys.readouterr().out.count(engine.answer("b", 4)) == 2


# ---- failures


def test_a_prompt_that_fails_does_not_lose_the_others(engine, tmp_path, capsys) -> None:
    file = prompts_file(
        tmp_path,
        {"prompt": "a"},
        {"messages": [{"role": "martian", "content": "x"}], "id": "m"},
        {"prompt": "b" * 2000},
        {"prompt": "c"},
    )
    out, report = tmp_path / "o", tmp_path / "r"
    assert main(["batch", "m", "--prompts-file", file, *GREEDY, "--out-prefix", str(out), "--report", str(report)]) == 1
    rows = {row["index"]: row for row in report_of(report)}
    assert {index: row["reason"] for index, row in rows.items()} == {1: "length", 2: "failed", 3: "failed", 4: "length"}
    assert rows[2]["error"] == "the template refuses the role martian"
    assert "2001" in rows[3]["error"]
    assert sorted(path.name for path in tmp_path.glob("o-*")) == ["o-1-1.txt", "o-4-1.txt"]
    assert (tmp_path / "o-4-1.txt").read_text() == engine.answer("c", 4) + "\n"
    *table, first, second = capsys.readouterr().err.splitlines()
    assert table[-1].endswith("2 failed")
    assert first == "ggml-engine: error: prompt 2 (m): the template refuses the role martian"
    assert second.startswith("ggml-engine: error: prompt 3: ")


def test_failures_are_told_although_it_is_quiet(engine, tmp_path, capsys) -> None:
    file = prompts_file(tmp_path, {"messages": [{"role": "martian", "content": "x"}]})
    assert main(["batch", "m", "--prompts-file", file, "--quiet"]) == 1
    assert capsys.readouterr().err == "ggml-engine: error: prompt 1: the template refuses the role martian\n"


@pytest.mark.parametrize("content", ['{"prompt": "a"}\n{"promt": "b"}\n', "", "\n", '{"prompt": "a"\n'])
def test_a_bad_file_is_an_error_before_anything_is_loaded(engine, tmp_path, capsys, content: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    assert main(["batch", "m", "--prompts-file", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ggml-engine: error: {file}")
    assert not engine.is_loaded


def test_a_model_that_cannot_be_loaded_leaves_no_files(monkeypatch, tmp_path, capsys) -> None:
    def load(_model: str, **_options: Any) -> None:
        raise GGUFError("bad-magic", "m", 0, "magic", "no")

    monkeypatch.setattr(run_module, "load_engine", load)
    args = ["--out-prefix", str(tmp_path / "o"), "--report", str(tmp_path / "r")]
    assert main(["batch", "m", "a", *args]) == 1
    assert list(tmp_path.iterdir()) == []


WRONG: list[tuple[list[str], tuple[str, ...]]] = [
    ([], ("there are no prompts",)),
    (["a", "--prompts-file", "x"], ("PROMPT", "--prompts-file")),
    (["a", "--prefix-cache-entries", "1", "--cache-kind", "sequence"], ("--prefix-cache-entries", "--cache-kind")),
    (["a", "--raw", "--system", "x"], ("--raw", "--system")),
    (["a", "--parse-special"], ("--parse-special", "--raw")),
    (["a", "--prefix-cache-entries", "-1"], ("--prefix-cache-entries",)),
    (["a", "--prompt-rounds", "0"], ("--prompt-rounds",)),
    (["a", "--max-decode-sequences", "0"], ("--max-decode-sequences",)),
    (["a", "--max-batch-tokens", "0"], ("--max-batch-tokens",)),
]


@pytest.mark.parametrize(("args", "names"), WRONG, ids=[" ".join(args) or "none" for args, _ in WRONG])
def test_a_wrong_use_is_code_2_and_names_the_options(engine, capsys, args: list[str], names: tuple[str, ...]) -> None:
    assert main(["batch", "m", *args]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert all(name in message for name in names), message
    assert not engine.is_loaded


# ---- Ctrl-C


def test_ctrl_c_ends_what_runs_and_writes_what_is_there(monkeypatch, tmp_path, capsys) -> None:
    engine = use(monkeypatch, FakeBatchEngine(capacity=1 << 16))
    n_forwards = 0

    def interrupt(_forward: Forward) -> None:
        nonlocal n_forwards
        n_forwards += 1
        if n_forwards == 60:
            os.kill(os.getpid(), signal.SIGINT)
        if n_forwards > 2000:
            raise RuntimeError("nobody ends it")

    engine.fake.on_forward = interrupt
    file = prompts_file(tmp_path, {"prompt": "a"}, {"prompt": "b", "max_tokens": 2}, {"prompt": "c"})
    report = tmp_path / "r"
    args = ["--prompt-rounds", "3", "--out-prefix", str(tmp_path / "o"), "--report", str(report)]
    assert main(["batch", "m", "--prompts-file", file, "--greedy", *args]) == 130
    rows = {(row["round"], row["index"]): row for row in report_of(report)}
    assert {key: row["reason"] for key, row in rows.items()} == {
        (1, 1): "cancelled",
        (1, 2): "length",
        (1, 3): "cancelled",
    }
    for index, prompt in ((1, "a"), (3, "c")):
        n = rows[1, index]["generated_tokens"]
        assert n >= 5
        assert (tmp_path / f"o-{index}-1.txt").read_text() == engine.answer(prompt, n) + "\n"
    assert len(capsys.readouterr().err.splitlines()) == 6, "the engine, and the table of what there is"
    assert engine.closed


def test_ctrl_c_while_the_model_is_loaded_is_code_130(monkeypatch, capsys) -> None:
    from ggml_engine.errors import CancelledError

    def load(_model: str, *, cancel: Any, **_options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert cancel()
        raise CancelledError("cancelled")

    monkeypatch.setattr(run_module, "load_engine", load)
    assert main(["batch", "m", "a"]) == 130
    assert capsys.readouterr() == ("", "\n")
