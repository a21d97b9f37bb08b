"""Where the results of a batch go: texts to stdout or to files, a line of JSON for each to a report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from ggml_engine.cli.output import TextOutput, json_text, one_line
from ggml_engine.errors import OptionError

if TYPE_CHECKING:
    from ggml_engine.cli.batch_input import BatchPrompt
    from ggml_engine.control.rounds import RoundResult


def row(prompt: BatchPrompt, result: RoundResult) -> dict[str, Any]:
    """A result for machines: `index` and `round` count from 1, times are in seconds."""
    stats, sampler = result.stats, prompt.config.sampler
    names = ("prompt_tokens", "evaluated_tokens", "reused_tokens", "generated_tokens")
    times = ("first_token_s", "prefill_s", "decode_s")
    return {
        "id": prompt.id,
        "index": result.index + 1,
        "round": result.round + 1,
        **{name: getattr(stats, name) for name in names},
        "reason": result.reason.value,
        "error": None if result.error is None else one_line(str(result.error)),
        "miss": None if result.miss is None else str(result.miss),
        "seed": None if sampler.is_greedy else sampler.seed,
        "queued_s": result.queued_s,
        **{name: getattr(stats, name) for name in times},
        "total_s": result.total_s,
        "restarts": result.n_restarts,
    }


def has_text(result: RoundResult) -> bool:
    """Whether there is an answer, or the part of one that was cancelled."""
    return not result.has_failed and result.queued_s is not None


class TextFiles:
    """One file for each prompt and round: PREFIX-PROMPT-ROUND.txt, both numbers from 1 and equally wide."""

    def __init__(self, prefix: str, n_prompts: int, n_rounds: int) -> None:
        self._prefix = prefix
        self._counts = (n_prompts, n_rounds)

    def path(self, index: int, round_: int) -> str:
        """The file of a prompt and a round, which count from 0."""
        numbers = (str(n + 1).zfill(len(str(count))) for n, count in zip((index, round_), self._counts, strict=True))
        return "-".join((self._prefix, *numbers)) + ".txt"

    @property
    def paths(self) -> Iterator[str]:
        """All of them."""
        n_prompts, n_rounds = self._counts
        return (self.path(index, round_) for round_ in range(n_rounds) for index in range(n_prompts))

    def write(self, result: RoundResult) -> None:
        """The text and one line end, as UTF-8: all of the file is there, or none of it."""
        if not has_text(result):
            return
        path = self.path(result.index, result.round)
        part = f"{path}.part"
        try:
            with open(part, "w", encoding="utf-8", newline="") as file:
                file.write(result.text + "\n")
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise


def check_places(paths: Iterator[str], *, overwrite: bool) -> None:
    """Refuse files that could not be written, before anything is computed.

    Raises OSError where there is no such directory, OptionError for a file that is there unless `overwrite`.
    """
    directories = set()
    for path in paths:
        directory = os.path.dirname(path) or "."
        if directory not in directories:
            os.listdir(directory)
            directories.add(directory)
        if not overwrite and os.path.isfile(path):
            raise OptionError(f"{path} is there already: choose another name, or give --overwrite")


class Report:
    """A line of JSON for each result, in the file as soon as it is written."""

    def __init__(self, path: str) -> None:
        self._file: TextIO = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115 - closed by `close`

    def write(self, values: dict[str, Any]) -> None:
        """Add a line."""
        self._file.write(json_text(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class OrderedTexts:
    """Texts on stdout in the order of prompts and rounds, each as soon as those before it are there.

    A text alone stands for itself; of several each has a line that says whose it is. `as_json` makes each a line of
    JSON instead, failures included.
    """

    def __init__(self, prompts: Sequence[BatchPrompt], n_rounds: int, *, as_json: bool) -> None:
        self._prompts = prompts
        self._n_rounds = n_rounds
        self._as_json = as_json
        self._output = TextOutput()
        self._next = (0, 0)  # round, index
        self._early: dict[tuple[int, int], RoundResult] = {}
        self._is_first = True

    def add(self, result: RoundResult) -> None:
        """Print it, and what waited for it, or keep it until its turn. Raises BrokenPipeError."""
        self._early[result.round, result.index] = result
        while (now := self._early.pop(self._next, None)) is not None:
            self._print(now)
            is_last = now.index + 1 == len(self._prompts)
            self._next = (now.round + 1, 0) if is_last else (now.round, now.index + 1)

    def _print(self, result: RoundResult) -> None:
        prompt = self._prompts[result.index]
        if self._as_json:
            self._output.write(json_text({**row(prompt, result), "text": result.text}) + "\n")
        elif has_text(result):
            head = ""
            if len(self._prompts) * self._n_rounds > 1:
                head = ("" if self._is_first else "\n") + f"==> {result_name(prompt, result, self._n_rounds)} <==\n"
            self._output.write(f"{head}{result.text}\n")
            self._is_first = False


def result_name(prompt: BatchPrompt, result: RoundResult, n_rounds: int) -> str:
    """Whose result it is: prompt 3 (its id), round 2."""
    name = f"prompt {result.index + 1}" + ("" if prompt.id is None else f" ({one_line(str(prompt.id))})")
    return f"{name}, round {result.round + 1}" if n_rounds > 1 else name
