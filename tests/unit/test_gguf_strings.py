"""Where the strings of an array are found: as one length leads to the next, however many are found at once."""

from __future__ import annotations

import random
import struct
from array import array

import numpy as np
import pytest

from ggml_engine.ggml import gguf_strings
from ggml_engine.ggml.gguf_source import FileBytes
from ggml_engine.ggml.gguf_strings import find_strings, split_strings


def in_file(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def found(data: bytes, position: int, n: int, code: str = "I") -> tuple[list[int], int]:
    starts = array(code, (0,)) * n
    n_found, end = find_strings(FileBytes("file", data), position, starts)
    return starts[:n_found].tolist(), end


def walked(data: bytes, position: int, n: int) -> tuple[list[int], int]:
    starts: list[int] = []
    while len(starts) < n and position + 8 <= len(data):
        starts.append(position + 8)
        position += 8 + int.from_bytes(data[position : position + 8], "little")
    return starts, position


KINDS = {
    "short": lambda r: b"a" * r.randrange(1, 20),
    "empty or short": lambda r: b"ab" * r.randrange(0, 4),
    "long now and then": lambda r: b"a" * (r.choice((255, 256, 257, 512)) if r.random() < 0.01 else 4),
    "long": lambda r: b"a" * r.randrange(200, 300),
    "of zeros and lengths": lambda r: bytes(r.choices((0, 0, 0, 0, 1, 8, 65), k=r.randrange(12))),
    "lengths in front of zeros": lambda r: r.choice((b"abc\x05" + bytes(7), b"\x08" + bytes(7), b"abc")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["I", "Q"])
def test_strings_are_found_where_each_length_leads(kind: str, code: str) -> None:
    r = random.Random(kind)
    for n in (0, 1, 255, 256, 700, 3000):
        before = bytes(r.randrange(20))
        data = before + in_file(*(KINDS[kind](r) for _ in range(n))) + b"what follows"
        assert found(data, len(before), n, code) == walked(data, len(before), n)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_array_leads_where_its_lengths_do(kind: str) -> None:
    r = random.Random(kind)
    data = in_file(*(KINDS[kind](r) for _ in range(600)))
    for _ in range(30):
        changed = bytearray(data)
        changed[r.randrange(len(changed))] = r.randrange(256)
        cut = bytes(changed[: r.randrange(1, len(changed) + 1)])
        assert found(cut, 0, 600, "Q") == walked(cut, 0, 600)


def test_a_length_that_leads_nowhere_ends_the_search() -> None:
    data = in_file(*[b"abc"] * 1000)
    for i, length in ((0, 2**64 - 1), (500, 2**63), (999, 2**32)):
        broken = data[: 11 * i] + struct.pack("<Q", length) + data[11 * i + 8 :]
        assert found(broken, 0, 1000) == (list(range(8, 11 * (i + 1), 11)), 11 * i + 8 + length)
    for length in (2**63, 2**64 - 1):  # the last one that is read by itself before a search goes on
        broken = bytes(8 * 255) + struct.pack("<Q", length) + bytes(8 * 344)
        assert found(broken, 0, 600) == (list(range(8, 8 * 257, 8)), 8 * 256 + length)


def test_strings_of_usual_lengths_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    n_walked = 0
    walk = gguf_strings._walk

    def counting(source: FileBytes, position: int, starts: array[int], first: int, until: int) -> tuple[int, int]:
        nonlocal n_walked
        n_walked += until - first
        return walk(source, position, starts, first, until)

    monkeypatch.setattr(gguf_strings, "_walk", counting)
    words = [b"word %d" % i for i in range(50_000)]
    assert len(found(in_file(*words), 0, len(words))[0]) == len(words)
    assert n_walked < 1000


@pytest.mark.parametrize(
    "strange",
    [[], [b""], [b"a\0b"], [b"\0"], [b"\xff"], [b"a\xffb"], [b"x" * 256], [b"x" * 65_535], [b"x" * 65_536, b"a\0b"]],
)
def test_strings_are_cut_out_as_they_are(strange: list[bytes]) -> None:
    texts = [b"first", *strange, "naïve ☃".encode(), *strange, b"last"]
    data = in_file(*texts)
    starts, end = found(data, 0, len(texts))
    ends = [start - 8 for start in starts[1:]] + [end]
    assert split_strings(memoryview(data), np.array(starts), np.array(ends)) == texts
    assert split_strings(memoryview(b""), np.empty(0, np.int64), np.empty(0, np.int64)) == []
