"""docs/serving.md: its table is that of the options, and its examples run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_bench import PROMPT, bench

from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.runner import Runner
from ggml_engine.serving.options import ServingOptions

pytestmark = pytest.mark.source_tree
PAGE = Path(__file__).parents[2] / "docs/serving.md"


def test_the_table_has_every_option_with_its_default() -> None:  # R90
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| \S.* \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(field.name, str(field.default)) for field in dataclasses.fields(ServingOptions)]


def test_the_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: list[RunnerOptions | None] = []
    with bench(RunnerOptions(max_sessions=144)) as b:

        def runner(given: RunnerOptions | None = None) -> Runner:
            options.append(given)
            return b.runner

        engine = SimpleNamespace(runner=runner, encode_chat=lambda _: list(PROMPT))
        names: dict[str, Any] = {"engine": engine, "directory": tmp_path}
        examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), names)
    assert options == [RunnerOptions(max_sessions=144), None]
    shown = capsys.readouterr().out
    assert len(examples) == 2
    assert "0 of 9 prompt tokens were not evaluated" in shown
    assert "['again', 'other', 'rivers']" in shown
