"""Runs the tests against the package with one thing taken out at a time: every patch here must turn its tests red.

    python tests/reverts/run.py [--green-already] [--within SECONDS] [name ...]

A patch of the compiled kernel's sources has it compiled anew in the copy.

A patch reverts one thing in a copy of the package; its head says in `Tests:` what to run, in `Red:` which of the groups
(classes or functions of those tests) must have a failure, and in `At least:` how many of them (all, where it is left
out): as soon as that many have one, the run of that patch ends. Without any patch the same tests must be green; with
`--green-already`, where all tests have just passed, it is only looked whether they are there. `--within`: after so long no
further one is begun, and it is told how many were not tried; the first is another one each time. Prints a table; exit
code 1 when a revert was not noticed.
"""

# ruff: noqa: T201 - a program: it prints

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from until_red import group_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 600
WORKERS = max(1, min(4, (os.cpu_count() or 1)))  # most of these tests compute with one thread
NATIVE = "+++ b/ggml_engine/native/"  # in a patch of what is compiled
RESULT = re.compile(r"^(tests/\S+?\.py)::(.+?) (PASSED|FAILED|ERROR)\b")
STARTED = re.compile(r"^(tests/\S+?\.py)::(.+?) ?$")


@dataclass(frozen=True)
class Revert:
    name: str
    patch: Path
    title: str
    tests: tuple[str, ...]
    red: tuple[str, ...]
    at_least: int

    @classmethod
    def read(cls, patch: Path) -> Revert:
        head, _, diff = patch.read_text(encoding="utf-8").partition("\n---\n")
        if not diff:
            raise SystemExit(f"{patch}: no line '---' between the head and the diff")
        title, *lines = head.splitlines()
        fields = dict(line.split(": ", 1) for line in lines if line)
        red = tuple(fields["Red"].split())
        return cls(patch.stem, patch, title, tuple(fields["Tests"].split()), red, int(fields.get("At least", len(red))))


@dataclass(frozen=True)
class Outcome:
    red: frozenset[str]  # groups with a failure
    green: frozenset[str]  # groups that ran without one
    n_failed: int
    status: str
    output: str


def copy_of_the_package(into: Path) -> None:
    shutil.copytree(ROOT / "ggml_engine", into / "ggml_engine", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", into / "tests", ignore=shutil.ignore_patterns("__pycache__", "reverts"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):  # the build reads them all
        shutil.copy(ROOT / name, into)


def build_the_kernel(folder: Path) -> str:
    """Compiles the kernel of the package in `folder` anew; what went wrong, or nothing."""
    for compiled in (folder / "ggml_engine" / "native").glob("_*.*.*"):
        compiled.unlink()  # or a build that fails would leave the old one
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    built = [*(folder / "ggml_engine" / "native").glob("_*.*.*")]
    return "" if built and not done.returncode else f"does not compile: {(done.stdout + done.stderr).strip()[-500:]}"


def pytest_in(folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs it over the package that lies in `folder`, without plugins of other packages, whose imports take seconds."""
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(HERE)]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # plain assertions: pytest's account of how two long byte strings differ takes minutes, in full where CI is set
    plain = ["--assert=plain", "--tb=short", "-p", "no:cacheprovider", "-p", "until_red"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *arguments],
        cwd=folder,
        env={**os.environ, **paths, "PYTHONUNBUFFERED": "1", "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def run_tests(folder: Path, tests: tuple[str, ...], until: tuple[str, ...] = (), at_least: int = 0) -> Outcome:
    """Runs them until `at_least` of the groups `until` are red. A process that dies fails the test it was in."""
    done = pytest_in(folder, ["-v", *(f"--red={group}" for group in until), f"--at-least={at_least}", *tests])
    red: set[str] = set()
    green: set[str] = set()
    n_failed = 0
    running = None
    for line in done.stdout.splitlines():
        result, started = RESULT.match(line), STARTED.match(line)
        if result:
            failed = result[3] != "PASSED"
            n_failed += failed
            (red if failed else green).add(group_of(result[2]))
            running = None
        elif started:
            running = group_of(started[2])
    status = {0: "green", 1: "red"}.get(done.returncode, f"exit {done.returncode}")
    if done.returncode < 0:
        status = f"died of signal {-done.returncode}"
        red |= {running} if running else set()
    return Outcome(frozenset(red), frozenset(green - red), n_failed, status, done.stdout + done.stderr)


def try_revert(revert: Revert) -> tuple[bool, str, Outcome | None]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        copy_of_the_package(folder)
        apply = ["git", "apply", "--whitespace=nowarn", str(revert.patch)]
        applied = subprocess.run(apply, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        if applied.returncode:
            return False, f"does not apply: {applied.stderr.strip()}", None
        if NATIVE in revert.patch.read_text(encoding="utf-8"):
            wrong = build_the_kernel(folder)
            if wrong:
                return False, wrong, None
        outcome = run_tests(folder, revert.tests, revert.red, revert.at_least)
    noticed = [group for group in revert.red if group in outcome.red]
    is_noticed = len(noticed) >= revert.at_least and (outcome.status == "red" or outcome.status.startswith("died"))
    told = (
        f"{outcome.status}, {outcome.n_failed} failed, red: {', '.join(noticed) or 'none of ' + ', '.join(revert.red)}"
    )
    return is_noticed, told, outcome


def groups_in(folder: Path, tests: tuple[str, ...]) -> Outcome:
    """Those that belong to these tests, without running any."""
    done = pytest_in(folder, ["--collect-only", "-q", "-m", "", *tests])
    found = frozenset(group_of(line.partition("::")[2]) for line in done.stdout.splitlines() if "::" in line)
    status = "green" if done.returncode == 0 else f"exit {done.returncode}"
    return Outcome(frozenset(), found, 0, status, done.stdout + done.stderr)


def is_green_without(reverts: list[Revert], green_already: bool) -> bool:
    """Whether the tests pass where nothing is reverted; that also shows that every named group is there."""
    by_file: dict[str, set[str]] = {}
    for test in (test for revert in reverts for test in revert.tests):
        by_file.setdefault(test.split("::")[0], set()).add(test)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(WORKERS) as workers:
        folder = Path(scratch)
        copy_of_the_package(folder)
        selected = [(file,) if file in tests else tuple(sorted(tests)) for file, tests in by_file.items()]
        if green_already:
            outcomes = [groups_in(folder, tuple(test for tests in selected for test in tests))]
        else:
            outcomes = list(workers.map(lambda tests: run_tests(folder, tests), selected))
    bad = [outcome for outcome in outcomes if outcome.status != "green"]
    missing = {group for revert in reverts for group in revert.red}.difference(*(each.green for each in outcomes))
    print(
        f"{'BAD' if bad or missing else 'ok':4} without a revert: {len(selected)} files, {'not all' if bad else 'all'} green",
        flush=True,
    )
    for outcome in bad:
        print(outcome.output[-4000:])
    if missing:
        print(f"     groups that no green test belongs to: {', '.join(sorted(missing))}")
    return not bad and not missing


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--green-already", action="store_true")
    parser.add_argument("--within", type=float)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    names, within = options.names, options.within
    reverts = [Revert.read(patch) for patch in sorted(HERE.glob("*.patch"))]
    unknown = set(names) - {revert.name for revert in reverts}
    if unknown or not reverts:
        print(f"no such reverts: {', '.join(sorted(unknown))}; there are: {', '.join(r.name for r in reverts)}")
        return 2
    reverts = [revert for revert in reverts if not names or revert.name in names]
    if within is not None:
        first = random.randrange(len(reverts))
        reverts = reverts[first:] + reverts[:first]
    start = time.monotonic()
    all_noticed, n_tried = is_green_without(reverts, options.green_already), 0

    def try_in_time(revert: Revert) -> tuple[bool, str, Outcome | None] | None:
        return try_revert(revert) if within is None or time.monotonic() - start < within else None

    with ThreadPoolExecutor(WORKERS) as workers:
        for revert, tried in zip(reverts, workers.map(try_in_time, reverts), strict=True):
            if tried is None:
                continue
            is_noticed, told, outcome = tried
            n_tried += 1
            all_noticed &= is_noticed
            print(f"{'ok' if is_noticed else 'BAD':4} {revert.name:44} {told}", flush=True)
            if outcome is not None and not is_noticed:
                print(outcome.output[-4000:])
    print(f"{n_tried} reverts in {time.monotonic() - start:.0f} s, {'all' if all_noticed else 'NOT ALL'} noticed")
    if n_tried < len(reverts):
        print(f"{len(reverts) - n_tried} of {len(reverts)} NOT TRIED for want of time")
    return 0 if all_noticed else 1


if __name__ == "__main__":
    sys.exit(main())
