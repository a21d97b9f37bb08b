"""The command line in a child process, with pipes or on a terminal of its own.

Every wait has a bound and ends when the child has said what is waited for; nothing sleeps.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

TIMEOUT_S = 90.0

# A child of a background job ignores Ctrl-C; these tests are about one that does not.
_START = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from ggml_engine.cli.main import main
sys.exit(main())
"""
_ON_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
"""


def command(*args: str, on_terminal: bool = False) -> list[str]:
    """The child's command line."""
    return [sys.executable, "-c", (_ON_TERMINAL if on_terminal else "") + _START, *args]


def environment(**changes: str) -> dict[str, str]:
    """The environment, with a terminal that draws nothing special, and Python's own buffers as users have them."""
    return {**{name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}, "TERM": "dumb", **changes}


def run(*args: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run to the end."""
    return subprocess.run(
        command(*args), input=stdin, capture_output=True, timeout=TIMEOUT_S, check=False, env=env or environment()
    )


@contextlib.contextmanager
def started(
    *args: str, stdin: int = subprocess.DEVNULL, stderr: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    """A running child; it is gone afterwards."""
    child = subprocess.Popen(command(*args), stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, env=environment())
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


class Terminal:
    """The user's side of a terminal."""

    def __init__(self) -> None:
        self._master, self.child_side = pty.openpty()
        self._seen = b""

    def type(self, data: bytes) -> None:
        """As if on the keyboard."""
        os.write(self._master, data)

    def read_until(self, pattern: bytes) -> re.Match[bytes]:
        """Read up to a match of `pattern`, and take it off what is read next."""
        end = time.monotonic() + TIMEOUT_S
        while (match := re.search(pattern, self._seen, re.DOTALL)) is None:
            ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
            try:
                data = os.read(self._master, 65536) if ready else b""
            except OSError:  # what Linux says when the other side is closed
                data = b""
            if not data:
                raise AssertionError(f"{pattern!r} did not come, but {self._seen!r}")
            self._seen += data
        self._seen = self._seen[match.end() :]
        return match

    def close(self) -> None:
        """Hang up."""
        os.close(self._master)
        os.close(self.child_side)


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    """A terminal."""
    made = Terminal()
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def on_terminal(*args: str) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    """A child whose terminal is ours to type at."""
    with terminal() as ours:
        side = ours.child_side
        child = subprocess.Popen(
            command(*args, on_terminal=True), stdin=side, stdout=side, stderr=side, start_new_session=True,
            env=environment(),
        )  # fmt: skip
        try:
            yield child, ours
        finally:
            child.kill()
            child.wait(TIMEOUT_S)
