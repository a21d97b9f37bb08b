"""`ggml-engine batch` on a real model, in a process of its own."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cli_process import TIMEOUT_S, on_terminal, run, started
from real_models import smollm2

from ggml_engine import Engine, RunnerOptions
from ggml_engine.control.config import GenConfig
from ggml_engine.control.rounds import PromptRounds, RoundPrompt, reserved_sessions
from ggml_engine.ggml.sampler_config import SamplerConfig

S = str(smollm2())
GREEDY = ("--greedy", "--threads", "1", "--quiet")
PROMPTS = (
    "Name a colour.", "Name two animals that swim.", "What is rain?", "Count to five.", "Why is the sky blue?",
    "Say hello in French.", "What is a cat?", "Who wrote Hamlet?",
)  # fmt: skip


def rows_of(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """The lines of a report by round and prompt."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {(row["round"], row["index"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def texts_of(stdout: bytes) -> dict[tuple[int, int], str]:
    """The texts of lines of JSON by round and prompt, which must be in this order."""
    rows = [json.loads(line) for line in stdout.decode().splitlines()]
    keys = [(row["round"], row["index"]) for row in rows]
    assert keys == sorted(keys)
    return {key: row["text"] for key, row in zip(keys, rows, strict=True)}


def test_the_second_round_of_eight_prompts_evaluates_one_token_of_each(tmp_path: Path) -> None:  # R40
    report = tmp_path / "r"
    args = ("--prompt-rounds", "2", "--prefix-cache-entries", "8", "--report", str(report), "-n", "6", "--json")
    done = run("batch", S, *PROMPTS, *GREEDY, *args)
    assert (done.returncode, done.stderr) == (0, b"")
    rows = rows_of(report)
    assert len(rows) == 16
    for index in range(1, 9):
        first, second = rows[1, index], rows[2, index]
        assert first["prompt_tokens"] == second["prompt_tokens"] > 20
        assert (first["evaluated_tokens"], first["reused_tokens"]) == (first["prompt_tokens"], 0)
        assert (second["evaluated_tokens"], second["reused_tokens"]) == (1, second["prompt_tokens"] - 1)
        assert {first["generated_tokens"], second["generated_tokens"]} == {6}
    assert len(texts_of(done.stdout)) == 16


def test_without_entries_nothing_is_reused(tmp_path: Path) -> None:  # R35
    report = tmp_path / "r"
    done = run("batch", S, *PROMPTS[:3], *GREEDY, "--prompt-rounds", "2", "-n", "3", "--report", str(report))
    assert done.returncode == 0
    rows = rows_of(report)
    assert len(rows) == 6
    assert all(row["reused_tokens"] == 0 and row["evaluated_tokens"] == row["prompt_tokens"] for row in rows.values())
    assert {row["miss"] for row in rows.values()} == {None}


def test_without_entries_nothing_is_cloned_and_with_some_only_so_many() -> None:  # R35 R51
    config = GenConfig(max_tokens=2, sampler=SamplerConfig(temperature=0.0))
    for n_entries, n_clones in ((0, 0), (2, 2 + 3)):  # captures, and look-ups that hit: all begin alike
        with Engine.load(smollm2(), ctx=1024, threads=1) as engine:
            runner = engine.runner(RunnerOptions(max_sessions=reserved_sessions(3, n_entries)))
            clone, seen = engine.executor.clone, []
            engine.executor.clone = lambda source, upto, clone=clone, seen=seen: (
                seen.append(upto) or clone(source, upto)
            )  # type: ignore[method-assign]
            prompts = [
                RoundPrompt(engine.encode_chat([{"role": "user", "content": text}]), config) for text in PROMPTS[:3]
            ]
            rounds = PromptRounds(runner, prompts, n_entries)
            for _ in range(2):
                results = list(rounds.run_round())
                assert [result.error for result in results] == [None] * 3
            assert len(seen) == n_clones


def test_greedy_texts_are_those_of_run_in_deterministic_mode_whatever_holds_the_cells(tmp_path: Path) -> None:  # R39
    prompts, options = PROMPTS[:3], (*GREEDY, "--deterministic", "-n", "5")
    alone = {}
    for index, prompt in enumerate(prompts, 1):
        done = run("run", S, prompt, *options)
        assert done.returncode == 0
        alone[index] = done.stdout.decode().removesuffix("\n")
    assert len(set(alone.values())) == 3
    ways = {
        "batched": ("--prefix-cache-entries", "3", "--max-decode-sequences", "2"),
        "little room": ("--ctx", "128"),
        "sequence": ("--cache-kind", "sequence"),
    }
    for way, args in ways.items():
        done = run("batch", S, *prompts, *options, "--json", "--prompt-rounds", "2", *args)
        assert done.returncode == 0, (way, done.stderr)
        assert texts_of(done.stdout) == {(r, index): text for r in (1, 2) for index, text in alone.items()}, way


def test_one_prompt_gives_what_run_gives_and_a_file_the_same() -> None:
    options = (*GREEDY, "-n", "8")
    alone = run("run", S, PROMPTS[0], *options).stdout
    assert len(alone) > 5
    assert run("batch", S, PROMPTS[0], *options).stdout == alone
    line = json.dumps({"messages": [{"role": "user", "content": PROMPTS[0]}]}).encode()
    assert run("batch", S, "--prompts-file", "-", *options, stdin=line).stdout == alone
    raw = run("run", S, PROMPTS[0], "--raw", *options).stdout
    assert raw != alone
    assert run("batch", S, PROMPTS[0], "--raw", *options).stdout == raw


def test_a_drawn_seed_gives_the_same_texts_again(tmp_path: Path) -> None:
    report = tmp_path / "r"
    args = (
        "batch",
        S,
        *PROMPTS[:2],
        "--threads",
        "1",
        "--deterministic",
        "--quiet",
        "-n",
        "8",
        "--temperature",
        "1.5",
        "--json",
    )
    first = run(*args, "--report", str(report))
    seeds = {row["seed"] for row in rows_of(report).values()}
    assert len(seeds) == 1
    assert texts_of(run(*args, "--seed", str(seeds.pop())).stdout) == texts_of(first.stdout)


def test_ctrl_c_cancels_all_and_keeps_what_there_is(tmp_path: Path) -> None:
    report, prefix = tmp_path / "r", tmp_path / "o"
    file = tmp_path / "p.jsonl"
    objects = [
        {"prompt": "Count to ten thousand."},
        {"prompt": "Hi", "max_tokens": 1},
        {"prompt": "Write a long story."},
    ]
    file.write_text("\n".join(map(json.dumps, objects)))
    args = ("--prompts-file", str(file), "--greedy", "--threads", "1", "--ignore-eos", "--prompt-rounds", "2")
    with started("batch", S, *args, "--report", str(report), "--out-prefix", str(prefix)) as child:
        end = time.monotonic() + TIMEOUT_S
        while not (report.exists() and report.read_bytes().endswith(b"\n")):  # the short one has ended, the others run
            assert child.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.3)  # some tokens of the others
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=TIMEOUT_S)
    assert (child.returncode, out) == (130, b"")
    rows = rows_of(report)
    assert {key: row["reason"] for key, row in rows.items()} == {
        (1, 1): "cancelled",
        (1, 2): "length",
        (1, 3): "cancelled",
    }
    for index in (1, 2, 3):
        text = (tmp_path / f"o-{index}-1.txt").read_text(encoding="utf-8")
        assert (len(text) > 1) == (rows[1, index]["generated_tokens"] > 0)
    assert not list(tmp_path.glob("*.part"))
    assert b"Traceback" not in err
    assert len(err.decode().splitlines()) == 6  # the engine, and the table


def test_a_terminal_shows_a_bar_that_is_gone_at_the_end() -> None:
    with on_terminal("batch", S, *PROMPTS[:2], "--greedy", "--threads", "1", "-n", "2") as (child, terminal):
        terminal.read_until(rb"answered \[#{12}-{12}\]  50% of 2 prompts")
        terminal.read_until(rb"\r +\r")
        terminal.read_until(rb"prompt  round  tokens")
        terminal.read_until(rb"all  .*\n")
        assert child.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("kind", ["sequence", "batched_cell"])
def test_a_chat_is_forgotten_with_any_kind_of_cache(kind: str) -> None:
    with on_terminal("run", S, "--greedy", "-n", "2", "--threads", "1", "--cache-kind", kind) as (child, terminal):
        for _ in range(2):
            terminal.read_until(rb"> ")
            terminal.type(b"Hello\n")
            terminal.read_until(rb"\| generated 2 \|")
            terminal.read_until(rb"> ")
            terminal.type(b"/reset\n")
        terminal.read_until(rb"> ")
        terminal.type(b"/exit\n")
        assert child.wait(TIMEOUT_S) == 0
