"""A pytest plugin for run.py: tests that can show nothing new are left out, so that a revert takes no longer than it must.

A group that has a failure is not run on, and the run ends as soon as enough of the named groups have one.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest


def group_of(test: str) -> str:
    """The class of a test, or its function where it has none; `test` is what follows its file."""
    return re.split(r"::|\[", test)[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--red", action="append", default=[], help="a group that is to have a failure")
    parser.addoption(
        "--at-least", type=int, default=0, help="as soon as so many of them have one, the run ends; 0: never"
    )


class UntilRed:
    def __init__(self, wanted: set[str], at_least: int) -> None:
        self._wanted = wanted
        self._at_least = at_least
        self._red: set[str] = set()

    @staticmethod
    def _group(item: pytest.Item) -> str:
        return group_of(item.nodeid.partition("::")[2])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not self._at_least or self._group(item) not in self._red:
            return None
        # as its own run would have: what only this item's class or module needed is torn down before another begins
        item.session._setupstate.teardown_exact(nextitem)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            self._red.add(self._group(item))
            if self._at_least and len(self._wanted & self._red) >= self._at_least:
                item.session.shouldfail = "enough groups are red"
        return report


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(UntilRed(set(config.getoption("--red")), config.getoption("--at-least")))
