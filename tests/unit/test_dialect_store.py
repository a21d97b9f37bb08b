"""The store of responses: bounded by number and size, with a share for each partition."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ggml_engine.server.dialects.response_store import ResponseStore

HI = ({"role": "user", "content": "hi"},)


class TestResponseStore:
    def test_the_oldest_go_first(self) -> None:
        store = ResponseStore(max_responses=2)
        for name in ("a", "b"):
            store.put("", name, HI)
        assert store.find("", "a") == HI
        store.put("", "c", HI)
        assert store.find("", "b") is None
        assert store.find("", "a") == store.find("", "c") == HI

    def test_their_size_is_bounded(self) -> None:
        store = ResponseStore(max_bytes=200)
        for number in range(10):
            store.put("", str(number), ({"role": "user", "content": "x" * 60},))
        assert 0 < len(store) <= 2
        store.put("", "huge", ({"role": "user", "content": "x" * 500},))
        assert store.find("", "huge") is None
        assert store.find("", "9") is not None

    def test_a_partition_does_not_see_anothers(self) -> None:
        store = ResponseStore()
        store.put("a", "r", HI)
        assert store.find("b", "r") is None

    def test_one_that_keeps_many_pushes_out_none_of_another(self) -> None:
        store = ResponseStore(max_responses=4)
        for name in ("a1", "a2"):
            store.put("a", name, HI)
        for number in range(20):
            store.put("b", str(number), HI)
        assert store.find("a", "a1") == store.find("a", "a2") == HI
        assert [number for number in range(20) if store.find("b", str(number))] == [18, 19]

    def test_one_that_keeps_much_pushes_out_none_of_another(self) -> None:
        store = ResponseStore(max_bytes=1000)
        store.put("a", "old", _said("x" * 300))
        for number in range(20):
            store.put("b", str(number), _said("y" * 200))
        assert store.find("a", "old") == _said("x" * 300)
        assert store.find("b", "19") == _said("y" * 200)
        store.put("b", "huge", _said("y" * 800))
        assert store.find("b", "huge") is None, "it takes more than the share of its partition"
        assert store.find("a", "old") == _said("x" * 300)

    def test_what_nobody_else_uses_is_for_one(self) -> None:
        store = ResponseStore(max_responses=8)
        for number in range(8):
            store.put("a", str(number), HI)
        assert all(store.find("a", str(number)) for number in range(8))
        store.put("b", "new", HI)
        assert store.find("b", "new") == HI
        assert [number for number in range(8) if store.find("a", str(number)) is None] == [0]

    @pytest.mark.parametrize("text", ["x" * 90, "\u20ac" * 30, "\U0001f600" * 22, '"\\\n' * 15], ids=ascii)
    def test_bytes_are_counted_as_they_are_kept(self, text: str) -> None:
        store = ResponseStore(max_bytes=1 << 20)
        store.put("", "r", _said(text))
        written = json.dumps(list(_said(text)), ensure_ascii=False, separators=(",", ":"))
        assert store.n_bytes == len(written.encode())
        assert store.find("", "r") == _said(text)
        store.put("", "r", HI)
        assert len(store) == 1
        assert store.n_bytes < 40

    @pytest.mark.parametrize("seed", range(5))
    def test_who_stays_within_a_share_loses_nothing(self, seed: int) -> None:
        rng = random.Random(seed)
        store = ResponseStore(max_responses=30, max_bytes=6000)
        mine: list[str] = []
        for number in range(400):
            store.put(rng.choice("bc"), str(number), _said("y" * rng.randrange(900)))
            if rng.random() < 0.1 and len(mine) < 10:
                mine.append(f"m{number}")
                store.put("a", mine[-1], _said("z" * 100))
            assert len(store) <= 30
            assert store.n_bytes <= 6000
            assert all(store.find("a", name) for name in mine)
        assert len(mine) == 10


def _said(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "assistant", "content": text},)
