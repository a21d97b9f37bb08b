"""Every architecture of the registry against libllama, on a tiny random model: one row of `architecture_rows` each.

Equal geometry: one thread, runs of one cell (libllama places tokens one after the other), 512 cells, full-size windows;
our matmul over V in columns against libllama without flash attention, our flash over V in rows against its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from architecture_rows import ROWS, Row, model_file
from engines import Logits, batch_of, running
from libllama import Type
from libllama_sequences import SequencesOracle
from tiny_models import VOCAB

from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml.ops import wrap
from ggml_engine.models.registry import ARCHITECTURES

N_CELLS = 512
ALLOWED_ERROR = 1e-6  # normalised mean squared, where a row has a tolerance
FORMS: dict[str, dict[str, Any]] = {
    "matmul": {"attention": "matmul", "v_layout": "columns", "k_type": "f32", "v_type": "f32"},
    "flash": {"attention": "flash", "v_layout": "rows", "k_type": "f16", "v_type": "f16"},
}
NATIVE = [row for row in ROWS.values() if row.architecture in ARCHITECTURES]


def names(rows: Sequence[Row]) -> list[str]:
    return [row.name for row in rows]


@dataclass
class Beside:
    """The executor and libllama, doing the same with the same sequences; a number is the sequence in both."""

    row: Row
    ours: GgmlExecutor
    theirs: SequencesOracle

    def __post_init__(self) -> None:
        self._sequences: dict[int, int] = {}
        self._rng = np.random.default_rng(3)
        self.compared: list[Logits] = []

    def open(self, number: int) -> None:
        self._sequences[number] = self.ours.open()

    def clone(self, source: int, number: int, length: int) -> None:
        self._sequences[number] = self.ours.clone(self._sequences[source], length)
        self.theirs.copy(source, number, length)

    def rewind(self, number: int, length: int) -> None:
        self.ours.rewind(self._sequences[number], length)
        self.theirs.cut(number, length)

    def step(self, what: str, *, outputs: Collection[int] | None = None, **lengths: int) -> None:
        """Appends so many random tokens to the sequences (`s0=40`) in one forward, and compares logits.

        `outputs` are the rows whose logits are wanted: by default all.
        """
        parts = [(int(name[1:]), self._rng.integers(3, VOCAB, n).tolist()) for name, n in lengths.items()]
        wanted = [outputs is None or row in outputs for row in range(sum(lengths.values()))]
        batch = batch_of([(self._sequences[number], ids) for number, ids in parts])
        found = self.ours.forward(replace(batch, wants_logits=np.array(wanted)))
        expected = self.theirs.append(parts, wanted)
        assert found.shape == expected.shape
        if not expected.size:
            return
        self.compared.append(expected)
        if self.row.tolerance:
            error = float(np.square(found - expected).mean() / np.square(expected).mean())
            assert error < ALLOWED_ERROR, f"{what}: differs by {error}"
        else:
            worst = np.abs(found - expected).max()
            assert found.tobytes() == expected.tobytes(), f"{what}: differs by at most {worst}"


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def beside(form: str, row: Row) -> Iterator[Beside]:
    options = FORMS[form]
    kinds = {f"type_{letter}": Type[options[f"{letter}_type"].upper()] for letter in "kv"}
    path = model_file(row.name)
    oracle = SequencesOracle(path, n_ctx=N_CELLS, flash=form == "flash", use_extra_bufts=True, **kinds)
    with oracle, running(path, capacity=N_CELLS, run=1, **options) as executor:
        yield Beside(row, executor, oracle)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_a_row_that_runs(architecture: str) -> None:
    assert architecture in {row.architecture for row in NATIVE}, "add a row to tests/support/architecture_rows.py"


@pytest.mark.parametrize("row", NATIVE, ids=names(NATIVE))
def test_logits_are_libllamas(beside: Beside, caplog: pytest.LogCaptureFixture) -> None:
    unused = [record.getMessage() for record in caplog.get_records("setup") if "is not used" in record.getMessage()]
    ignored = beside.row.ignored
    assert [text for text in unused if not ignored or not re.search(ignored, text)] == []
    assert bool(unused) == bool(ignored)
    beside.open(0)
    beside.step("prefill", s0=40)  # past windows of 8 and the border of rope scaling at 32
    for i in range(8):
        beside.step(f"decode {i}", s0=1)
    beside.open(1)
    beside.step("prefill of a second sequence", s1=20)
    for i in range(2):
        beside.step(f"decode of both, {i}", s0=1, s1=1)
    beside.clone(0, 2, 30)
    beside.step("the clone goes its own way", s2=5)
    beside.step("all three", s0=1, s1=1, s2=2)
    beside.step("logits of some", s0=5, s1=2, outputs=(1, 4, 6))
    beside.step("no logits", s0=3, s1=1, outputs=())
    beside.step("decode of both after that", s0=1, s1=1)
    beside.rewind(0, 20)  # by more than a window
    beside.step("rewound", s0=12)
    for i in range(2):
        beside.step(f"decode after the rewind, {i}", s0=1)
    logits = np.concatenate(beside.compared)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.5, "flat logits would hide mistakes"
    assert np.abs(np.diff(logits, axis=0)).mean() > 0.25 * logits.std(), "logits hardly depend on the tokens"


def test_glm4_sums_the_last_products_of_attention_and_feed_forward_in_f32() -> None:
    """On the CPU the sums are f32 anyway; other devices may take less."""
    with running(model_file("glm4"), capacity=64) as executor:
        executor.forward(batch_of([(executor.open(), [5, 9])]))
        (ready,) = executor.graphs._ready.values()
        base, cgraph = ready.inputs._b.base, ready.inputs._b.cgraph
        nodes = [wrap(base.ggml_graph_node(cgraph, i)) for i in range(ready.graph.n_nodes)]
        kept = {
            node.name for node in nodes if node.ptr.op_params[0] == base.GGML_PREC_F32 and node.name.endswith(".out")
        }
    assert kept >= {f"blk.{il}.{part}.out" for il in range(4) for part in ("attn_output", "ffn_down")}
    assert "blk.0.ffn_up.out" not in kept
