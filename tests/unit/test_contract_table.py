"""Rules of the cache's contract and the tests that hold them: a test names its rules in a comment, `# R63 R71`."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

TESTS = Path(__file__).parents[1]

# What this version implements: clones, prefix caches in memory, prepared inputs, capacity, cancelling (R1 to R62), the
# pool (R63 to R74; R66 is about rings, which are only in the fake executor), serving (R75 to R93), rewinds, aborts,
# history; of the rules about tests those that a test can hold.
EXPECTED = {f"R{n}" for n in (*range(1, 66), *range(67, 96), 98, *range(100, 111))}


def rules_of(source: str) -> dict[str, list[str]]:
    """Rule -> names of the tests (or classes of tests) that have it in a comment between their decorators and body."""
    comments = {
        token.start[0]: re.findall(r"\bR\d+\b", token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    table: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not node.name.lower().startswith("test"):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        # up to the end of a signature, or the one line of a class
        end = node.lineno if isinstance(node, ast.ClassDef) else max(node.body[0].lineno - 1, node.lineno)
        for line in range(first, end + 1):
            for rule in comments.get(line, []):
                table.setdefault(rule, []).append(node.name)
    return table


def contract_table() -> dict[str, list[str]]:
    """Rule -> `file::test` of every test below `tests/`."""
    table: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for rule, names in rules_of(path.read_text(encoding="utf-8")).items():
            table.setdefault(rule, []).extend(f"{path.relative_to(TESTS)}::{name}" for name in names)
    return table


def test_every_rule_of_this_version_has_a_test() -> None:
    table = contract_table()
    missing = EXPECTED - table.keys()
    assert not missing, f"no test names {sorted(missing)}; those that are named: {table}"


def test_a_rule_counts_only_beside_a_test() -> None:
    source = """
# R1 in the middle of nowhere
def other() -> None:  # R2
    ...

class TestThings:  # R3
    @parametrize("n", [1])  # R4
    def test_one(
        self, n: int
    ) -> None:  # R5 R6
        x = 1  # R7
"""
    assert rules_of(source) == {"R3": ["TestThings"], "R4": ["test_one"], "R5": ["test_one"], "R6": ["test_one"]}
