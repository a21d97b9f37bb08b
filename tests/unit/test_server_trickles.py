"""Requests in the smallest pieces: byte by byte, and in thousands of chunks. Answered or refused, beside others."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from server_fakes import Jobs, RunningServer, everything, post, running

from ggml_engine.server.transport import READ_BYTES, ServerProtocol

CHUNKED = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
CHUNKED += b"Connection: close\r\n\r\n"
N_MOST = 100_000


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    limits = {"header_timeout_s": 5, "body_timeout_s": 5, "write_timeout_s": 5}
    with running(Jobs(), monkeypatch=monkeypatch, max_body_bytes=N_MOST, **limits) as found:
        yield found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that protocols were given at once."""
    found: list[int] = []
    received = ServerProtocol.data_received

    def data_received(protocol: ServerProtocol, data: bytes) -> None:
        found.append(len(data))
        received(protocol, data)

    monkeypatch.setattr(ServerProtocol, "data_received", data_received)
    return found


def in_chunks(body: bytes, n: int = 1) -> bytes:
    """A body in chunks of `n` bytes."""
    pieces = (body[start : start + n] for start in range(0, len(body), n))
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def body_of(n_bytes: int) -> bytes:
    return json.dumps({"a": "x" * (n_bytes - 9)}).encode()


def trickle(connection: socket.socket, data: bytes, pause_s: float = 0.001) -> int:
    """Send byte by byte; how many were sent when an answer came, or all were."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for n, byte in enumerate(data):
        connection.sendall(bytes((byte,)))
        if select.select([connection], [], [], pause_s)[0]:
            return n + 1
    return len(data)


def parted(answer: bytes) -> tuple[int, Any]:
    """Status and JSON."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_a_request_that_comes_byte_by_byte_in_its_time_is_answered(server: RunningServer, reads: list[int]) -> None:
    body = body_of(120)
    request = post("/echo", body, "Connection: close")
    with server.connect() as connection:
        assert trickle(connection, request[:-60]) == len(request) - 60  # all of the head, and half of the body
        assert server.health() == 200
        assert trickle(connection, request[-60:]) == 60
        status, answer = parted(everything(connection))
    assert (status, answer["body"]) == (200, json.loads(body))
    assert reads.count(1) > len(request) // 2


def test_chunks_that_come_byte_by_byte_are_put_together(server: RunningServer) -> None:
    body = body_of(60)
    request = CHUNKED + in_chunks(body)
    with server.connect() as connection:
        assert trickle(connection, request) == len(request)
        status, answer = parted(everything(connection))
    assert (status, answer["body"]) == (200, json.loads(body))


def test_a_body_that_trickles_longer_than_it_may_take_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Jobs(), monkeypatch=monkeypatch, body_timeout_s=0.2) as server:
        for head, body in ((post("/echo", length=10_000)[:-2], b"x" * 10_000), (CHUNKED, in_chunks(b"x" * 5000))):
            with server.connect() as connection:
                connection.sendall(head)
                assert trickle(connection, body, 0.005) < len(body)
                status, answer = parted(everything(connection))
            assert (status, answer["error"]["code"]) == (408, "body_timeout")
        assert server.health() == 200


def test_a_body_in_as_many_chunks_as_bytes_is_whole_and_holds_nobody_up(
    server: RunningServer, reads: list[int]
) -> None:
    """However fast it comes, the event loop takes little of it at once, and can serve others in between."""
    body = body_of(N_MOST)
    answers: list[bytes] = []
    with server.connect() as connection:
        sending = threading.Thread(target=lambda: connection.sendall(CHUNKED + in_chunks(body)))
        reading = threading.Thread(target=lambda: answers.append(everything(connection)))
        sending.start()
        reading.start()
        assert server.health() == 200
        sending.join()
        reading.join()
    status, answer = parted(answers[0])
    assert (status, answer["body"]) == (200, json.loads(body))
    assert max(reads) <= READ_BYTES


def test_chunks_beyond_the_bound_of_a_body_are_a_413(server: RunningServer, reads: list[int]) -> None:
    with server.connect() as connection:
        connection.sendall(CHUNKED + in_chunks(body_of(N_MOST + 1)))
        status, answer = parted(everything(connection))
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert max(reads) <= READ_BYTES


def test_a_chunk_without_an_end_is_given_up(server: RunningServer) -> None:
    """Its extension grows, or its trailers do: neither is kept beyond the bound of a head."""
    for endless in (b"1;" + b"x" * 1_000_000, b"0\r\n" + b"X: y\r\n" * 200_000):
        begun = time.monotonic()
        with server.connect() as connection:
            answer = b""
            try:
                connection.sendall(CHUNKED + endless)
                answer = everything(connection)
            except ConnectionError:
                pass  # it was given up while it still wrote
        assert time.monotonic() - begun < 5, "until the time of a body had passed"
        assert answer == b"" or parted(answer)[1]["error"]["code"] == "bad_request"
        assert server.health() == 200
