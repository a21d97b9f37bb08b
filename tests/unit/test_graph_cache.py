"""`GraphCache`: which graphs stay, and that what it counts is read without touching one. With graphs that compute nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ggml_engine.executor.graph_cache import GraphCache


class FakeGraph:
    """Ten bytes until it is freed; `reads` counts who asked for them."""

    reads = 0

    def __init__(self) -> None:
        self.is_freed = False

    @property
    def working_bytes(self) -> int:
        FakeGraph.reads += 1
        assert not self.is_freed, "memory of the library that was given back"
        return 10

    def free(self) -> None:
        self.is_freed = True


def cache_of(max_graphs: int = 8, max_bytes: int = 1000) -> tuple[Any, list[FakeGraph]]:
    graphs: list[FakeGraph] = []

    def build(_key: Any) -> Any:
        graphs.append(FakeGraph())
        return SimpleNamespace(graph=graphs[-1])

    cache: Any = GraphCache(build, max_graphs, max_bytes)
    return cache, graphs


def test_the_bytes_of_graphs_are_told_without_touching_one_as_another_thread_may_be_freeing_it() -> None:
    cache, graphs = cache_of(max_graphs=3)
    for key in range(5):
        cache.get(key)
    before = FakeGraph.reads
    assert cache.working_bytes == 30
    assert FakeGraph.reads == before
    assert [graph.is_freed for graph in graphs] == [True, True, False, False, False]


def test_bytes_follow_what_is_dropped_and_cleared() -> None:
    cache, graphs = cache_of()
    for key in range(4):
        cache.get(key)
    cache.drop(lambda key: key in (1, 2))
    assert cache.working_bytes == 20
    cache.get(1)
    assert cache.working_bytes == 30
    cache.clear()
    assert cache.working_bytes == 0
    assert all(graph.is_freed for graph in graphs)
    cache.clear()
    assert cache.working_bytes == 0


def test_graphs_beyond_the_bytes_go_the_oldest_first() -> None:
    cache, graphs = cache_of(max_bytes=25)
    for key in range(4):
        cache.get(key)
    assert [graph.is_freed for graph in graphs] == [True, False, False, False]
    assert cache.working_bytes == 30  # those there are, before the next one is built
