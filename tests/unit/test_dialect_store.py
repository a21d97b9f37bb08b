"""The store of responses: bounded by number and size, and by partition."""

from __future__ import annotations

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
        store = ResponseStore(max_chars=200)
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
