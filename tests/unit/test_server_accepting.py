"""`Acceptor`: whatever goes wrong with one connection, the next one is accepted, and no place is lost or won."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest
from server_fakes import WAIT_S, run

from ggml_engine.server.transport import Acceptor, Room

FAULTS = [ValueError("a bug"), OSError(errno.EMFILE, "no files"), OSError(errno.EBADF, "what socket"), MemoryError()]


class Greeting(asyncio.Protocol):
    """Says hello, and gives its place back when the client is gone."""

    def __init__(self, room: Room) -> None:
        self._room = room

    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")

    def connection_lost(self, _error: Exception | None) -> None:
        self._room.leave()


class Accepting:
    """An acceptor with one place, and connections to it."""

    def __init__(self, make_protocol: Callable[[Room], asyncio.Protocol] = Greeting) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        room = Room(1)
        self.acceptor = Acceptor(self._listening, lambda: make_protocol(room), room)

    async def greeted(self) -> bytes:
        """What a connection is told until it is closed on either side."""
        reader, writer = await asyncio.open_connection(*self._listening.getsockname()[:2])
        said = await asyncio.wait_for(reader.read(5), WAIT_S)
        writer.close()
        return said

    async def check_places(self) -> None:
        """There is one place: a second connection waits for the first."""
        address = self._listening.getsockname()[:2]
        reader, writer = await asyncio.open_connection(*address)
        assert await asyncio.wait_for(reader.read(5), WAIT_S) == b"hello"
        late_reader, late_writer = await asyncio.open_connection(*address)
        late = asyncio.create_task(late_reader.read(5))
        assert not (await asyncio.wait({late}, timeout=0.05))[0]
        writer.close()
        assert await asyncio.wait_for(late, WAIT_S) == b"hello"
        late_writer.close()

    async def close(self) -> None:
        self.acceptor.close()
        await self.acceptor.wait_closed()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggml_engine.server.transport._RETRY_ACCEPT_S", 0.01)


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_after_an_error_of_accept_the_next_connection_is_served(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        loop: Any = asyncio.get_running_loop()
        accept = loop.sock_accept
        faults = [fault] * 3

        async def failing(listening: socket.socket) -> Any:
            if faults:
                raise faults.pop()
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", failing)
        accepting = Accepting()
        assert await accepting.greeted() == b"hello"
        assert not faults
        await accepting.check_places()
        await accepting.close()

    with caplog.at_level(logging.WARNING, "ggml_engine.server"):
        run(test())
    assert len(caplog.records) == 3


def test_an_accept_that_always_fails_leaves_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        n = 0

        async def failing(_listening: socket.socket) -> Any:
            nonlocal n
            n += 1
            if n > 100:
                raise asyncio.CancelledError  # ends what would hold the loop for ever
            raise OSError(errno.EBADF, "what socket")

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", failing)
        accepting = Accepting()
        while n < 3:
            await asyncio.sleep(0)
        assert n < 100
        await accepting.close()

    run(test())


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_connection_that_cannot_be_made_is_closed_and_the_next_one_is_served(fault: Exception) -> None:
    faults = [fault]

    def make_protocol(room: Room) -> asyncio.Protocol:
        if faults:
            raise faults.pop()
        return Greeting(room)

    async def test() -> None:
        accepting = Accepting(make_protocol)
        assert await accepting.greeted() == b""
        assert await accepting.greeted() == b"hello"
        await accepting.check_places()
        await accepting.close()

    run(test())
