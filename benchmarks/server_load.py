"""What `ggml-engine serve` does under load: streams beside a reader that stalls, /health, and how soon cells are back.

    python benchmarks/server_load.py [--model NAME_OR_PATH] [--streams 8] [--tokens 64] [--turns 5] [--threads N]

The server is a process of its own, the clients are those of the tests. Throughput is tokens per second of `--streams`
greedy streams from the first request to the last answer, in turns one after the other: alone, beside one reader more
that keeps up, and beside one that takes nothing from its socket; every ratio is of two turns that followed each other.
/health is asked for all the time meanwhile. Cells are back when `/metrics` shows none in use, after a client has reset
its connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from load_clients import (
    HealthProbe,
    Response,
    ServerProcess,
    completion,
    post,
    send,
    server_process,
    wait_until,
)

N_PROMPT = 24
PATH = "/v1/completions"
WAIT_S = 120.0

Beside = Callable[[ServerProcess, int], contextlib.AbstractAsyncContextManager[None]]


def endless(first: int) -> dict[str, Any]:
    """A stream with more to say than a turn takes, in large events."""
    return completion(first, N_PROMPT, 2000, logprobs=5, stream=True)


@contextlib.asynccontextmanager
async def nobody(_server: ServerProcess, _first: int) -> AsyncIterator[None]:
    """The streams are alone."""
    yield


@contextlib.asynccontextmanager
async def quick_reader(server: ServerProcess, first: int) -> AsyncIterator[None]:
    """One more that reads all that comes."""
    response = await post(server.port, PATH, endless(first))
    reading = asyncio.create_task(drain(response))
    try:
        yield
    finally:
        reading.cancel()
        response.leave()


@contextlib.asynccontextmanager
async def stalled_reader(server: ServerProcess, first: int) -> AsyncIterator[None]:
    """One more that reads nothing."""
    data = json.dumps(endless(first)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(("127.0.0.1", server.port))
        made.sendall(head.encode() + b"\r\n\r\n" + data)
        await asyncio.to_thread(wait_until, lambda: server.metrics()["active_requests"], WAIT_S, server.metrics)
        yield


async def drain(response: Response) -> None:
    """Read to the end."""
    async for _ in response.chunks():
        pass


async def turn(server: ServerProcess, beside: Beside, options: argparse.Namespace, first: int) -> float:
    """Tokens per second of all streams together."""
    async with beside(server, first):
        begun = time.perf_counter()
        bodies = [completion(first + 1 + i, N_PROMPT, options.tokens, stream=True) for i in range(options.streams)]
        found = await asyncio.gather(*(post(server.port, PATH, body) for body in bodies))
        await asyncio.gather(*(drain(response) for response in found))
        seconds = time.perf_counter() - begun
    await asyncio.to_thread(wait_until, lambda: is_at_rest(server), WAIT_S, server.metrics)
    return options.streams * options.tokens / seconds


def is_at_rest(server: ServerProcess) -> bool:
    """No request, no lane and no cell is in use."""
    now = server.metrics()
    return not any(now[name] for name in ("active_requests", "queued_requests", "capture_lanes_used", "cells_used"))


def throughput(server: ServerProcess, options: argparse.Namespace) -> None:
    """Streams alone, and beside another reader."""
    kinds: dict[str, Beside] = {
        "alone": nobody,
        "reader that keeps up": quick_reader,
        "reader that stalls": stalled_reader,
    }
    speeds: dict[str, list[float]] = {name: [] for name in kinds}
    asyncio.run(turn(server, nobody, options, 0))
    with HealthProbe(server) as probe:
        for i in range(options.turns):
            for j, (name, beside) in enumerate(kinds.items()):
                speeds[name].append(asyncio.run(turn(server, beside, options, 20 * (3 * i + j + 1))))
    print(f"\n{options.streams} streams of {options.tokens} tokens, {options.turns} turns of each kind, interleaved\n")
    print(f"| beside them | tokens/s | to alone | to a reader that keeps up |\n{'| --- ' * 4}|")
    for name, found in speeds.items():
        ratios = [ratio(found, speeds[other]) for other in ("alone", "reader that keeps up")]
        print(f"| {name} | {spread(found, '.0f')} | {' | '.join(ratios)} |")
    show_health("while they run", probe)


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Turn by turn."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)], ".2f")


def spread(values: list[float], form: str) -> str:
    """The median, least and greatest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def show_health(when: str, probe: HealthProbe) -> None:
    """A line about /health."""
    found = sorted(probe.seconds)
    p50, p99 = (1000 * found[min(len(found) - 1, round(q * (len(found) - 1)))] for q in (0.5, 0.99))
    print(
        f"\n/health {when}: {len(found)} answers, p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
        f"most {1000 * found[-1]:.1f} ms, {probe.failures} failed"
    )


async def left_in(server: ServerProcess, body: dict[str, Any], is_there: Callable[[dict[str, float]], bool]) -> float:
    """Seconds until a request's cells are back, whose client leaves when it is there."""
    response = await send(server.port, PATH, body)
    await asyncio.to_thread(wait_until, lambda: is_there(server.metrics()), WAIT_S, server.metrics)
    response.leave()
    return await asyncio.to_thread(wait_until, lambda: is_at_rest(server), WAIT_S, server.metrics)


def cells_back(server: ServerProcess, options: argparse.Namespace) -> None:
    """Clients that leave."""
    cases: dict[str, tuple[dict[str, Any], Callable[[dict[str, float]], bool]]] = {
        "prefill, stream": (completion(1, 3000, 9, stream=True), lambda now: now["cells_used"] > 0),
        "prefill, whole answer": (completion(2, 3000, 9), lambda now: now["cells_used"] > 0),
        "decode, stream": (completion(3, N_PROMPT, 2000, stream=True), lambda now: now["cells_used"] > 2 * N_PROMPT),
        "decode, whole answer": (completion(4, N_PROMPT, 2000), lambda now: now["cells_used"] > 2 * N_PROMPT),
    }
    print(f"\n| client leaves in | ms until its cells are back, {options.turns} times |\n| --- | --- |")
    for name, (body, is_there) in cases.items():
        found = [1000 * asyncio.run(left_in(server, body, is_there)) for _ in range(options.turns)]
        print(f"| {name} | {spread(found, '.0f')} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    threads = [] if options.threads is None else ["--threads", str(options.threads)]
    given = ["--ctx", "4096", "--prefix-cache-entries", "0", "--quiet", *threads]
    with (
        tempfile.TemporaryDirectory() as directory,
        server_process(Path(directory), *given, model=options.model) as server,
    ):
        throughput(server, options)
        cells_back(server, options)


if __name__ == "__main__":
    main()
