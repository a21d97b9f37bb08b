"""The tests of the control plane keep the contract's rules about tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from control_bench import PROMPT, bench
from fake_executor import WAIT_S, FakeExecutor, continuation, keys_of, logits_after, next_token

from ggml_engine.executor.batch import Batch

HERE = Path(__file__).parent
FILES = sorted([*HERE.glob("test_control_*.py"), *HERE.glob("test_prefix_*.py")])
REVERTS = HERE.parent / "reverts"

# the methods that wait, and which of their arguments is the timeout
WAITS = {"result": 0, "exception": 0, "wait": 0, "join": 0, "wait_for": 1, "open_session": 0}


@pytest.mark.source_tree
def test_the_most_important_reverts_are_kept() -> None:  # R94
    kept = {patch.stem for patch in REVERTS.glob("control_*.patch")}
    assert len(kept) >= 12, kept
    for patch in REVERTS.glob("control_*.patch"):
        head = patch.read_text(encoding="utf-8").partition("\n---\n")[0]
        assert "Tests: tests/unit/test_control_" in head, patch


def test_a_gate_that_held_nothing_fails_its_test() -> None:  # R95
    with bench() as b:
        session = b.open()
        with pytest.raises(AssertionError, match="the gate held nothing"), b.executor.holding_forward(after=5):
            b.run(session, PROMPT, 2)
        with pytest.raises(AssertionError, match="the gate held nothing"), b.executor.holding_clone():
            b.run(session, [1], 2)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_whatever_waits_has_a_timeout(path: Path) -> None:  # R98
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in WAITS:
            continue
        if isinstance(node.func.value, ast.Constant):
            continue  # "".join
        has_one = len(node.args) > WAITS[node.func.attr] or any(each.arg == "timeout" for each in node.keywords)
        assert has_one, f"{path.name}:{node.lineno} waits for ever"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nobody_sleeps(path: Path) -> None:
    names = {
        node.attr for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)
    }
    assert "sleep" not in names


def test_a_bench_notices_what_is_left_open() -> None:  # R100
    with pytest.raises(AssertionError, match="sequences opened"), bench() as b:
        b.executor.open()
    with pytest.raises(AssertionError, match="1 samplers are open"), bench() as b:
        b.text.count_samplers(1)


def test_the_executor_notices_a_history_that_is_wrong() -> None:  # R94
    executor = FakeExecutor(64)
    sequence = executor.open()
    rows = executor.forward(Batch.of_sequence(sequence, [1, 2, 3]))
    assert rows.argmax() == next_token([1, 2, 3], 97) == continuation([1, 2, 3], 1, 97)[0]
    assert (rows[0] == logits_after(keys_of([1, 2, 3]), 97)).all()
    others = [[1, 2], [2, 1, 3], [1, 2, 3, 3], [1, 3], [0, 1, 2, 3]]
    assert sum(next_token(other, 97) == int(rows.argmax()) for other in others) == 0
    assert len({next_token([i], 97) for i in range(97)}) > 40, "the hash says little"
    cell = executor.cache.cells_of(sequence)[1]
    executor._keys[cell] = 5  # as a cell that was given to two owners would be
    rows = executor.forward(Batch.of_sequence(sequence, [4]))
    assert rows.argmax() == next_token([1, 5, 3, 4], 97) != next_token([1, 2, 3, 4], 97)
    executor.close(sequence)
    executor.check_balance()


def test_a_gate_lets_through_what_it_is_told_to() -> None:  # R95
    with bench() as b:
        session = b.open()
        with b.executor.holding_forward(after=2) as gate:
            generation = b.start(session, PROMPT, 6)
            gate.wait_held()
            assert b.executor.n_forwards == 3
            gate.step()
            assert b.executor.n_forwards == 4
            assert len(generation.tokens) == 3
        assert generation.wait(WAIT_S)
