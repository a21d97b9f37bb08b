"""What every test shares: in CI (the environment variable `CI`) or with `--no-skips`, a skipped test is a failed one."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import TypeVar

import pytest

os.environ["GGML_ENGINE_CALIBRATION"] = "off"  # no test depends on what a machine measured; children inherit it


def _keep_to_own_processors() -> None:
    """A worker of several (`-n`) has its share of the processors: ggml's threads wait for each other by spinning."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        index, n_workers = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        share = sorted(os.sched_getaffinity(0))[index::n_workers]
        if share:
            os.sched_setaffinity(0, share)


_keep_to_own_processors()  # before there are threads that compute

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_configure() -> None:
    # A shell starts what it puts in the background with SIGINT ignored, and the command line then leaves it so.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="a skipped or xfailed test fails, as it does where CI is set"
    )


def _refuse_skip(report: Report, config: pytest.Config) -> Report:
    """A skip is a hole in what CI says: nobody reads its reason."""
    if report.skipped and (config.getoption("--no-skips") or os.environ.get("CI")):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipping is not allowed here. {reason}"
        if hasattr(report, "wasxfail"):
            del report.wasxfail
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _refuse_skip(report, item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _refuse_skip(report, collector.config)
