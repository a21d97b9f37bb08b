"""What is of one partition is not there for another: sessions, snapshots, counts of cached tokens."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from control_bench import PROMPT
from fake_executor import WAIT_S
from serving_bench import serving

from ggml_engine.errors import UnknownSessionError


def test_a_snapshot_serves_its_own_partition_alone() -> None:
    with serving(prefix_cache_entries=8) as s:
        assert s.reused(partition="x") == 0
        assert s.reused(partition="y") == 0
        assert s.reused() == 0
        for partition in ("x", "y", ""):
            assert s.reused(partition=partition) == len(PROMPT) - 1
        assert s.keys == [PROMPT] * 3


def test_a_session_that_has_more_in_another_partition_is_not_found() -> None:
    with serving(prefix_cache_entries=8, prefix_checkpoint_prompt_end="every") as s:
        history = s.turn("a", PROMPT, partition="x")
        longer = s.turn("a", [*history, 1, 2], partition="x")
        assert s.reused(longer, session="a", partition="y") == 0
        assert s.reused([*longer, 3], session="a", partition="x") == len(longer) - 1


def test_names_are_those_of_a_partition() -> None:
    with serving() as s:
        s.turn("a", PROMPT, partition="x")
        s.turn("a", [40, 41], partition="y")
        s.turn("b", PROMPT, partition="y")
        assert [info.name for info in s.runtime.sessions("x")] == ["a"]
        assert [info.name for info in s.runtime.sessions("y")] == ["a", "b"]
        assert s.runtime.sessions() == []
        for call in (
            lambda: s.runtime.close_session("x", "b"),
            lambda: s.runtime.rewind("x", "b", 1, WAIT_S),
            lambda: s.runtime.fork("x", "b", "c", timeout=WAIT_S),
        ):
            with pytest.raises(UnknownSessionError):
                call()
        s.runtime.close_session("x", "a")
        assert [info.name for info in s.runtime.sessions("y")] == ["a", "b"]


def test_partitions_use_the_same_name_at_the_same_time() -> None:
    with serving() as s:
        with s.b.executor.holding_forward() as gate:
            replies = [s.submit(session="a", partition="x")]
            gate.wait_held()
            replies.append(s.submit(session="a", partition="y"))
        for reply in replies:
            assert reply.result(WAIT_S)


def test_all_partitions_share_the_number_of_entries() -> None:
    with serving(prefix_cache_entries=2) as s:
        for partition in ("x", "y", "z"):
            s.ask(partition=partition)
        assert len(s.keys) == 2
        assert s.reused(partition="x") == 0
        assert s.reused(partition="z") == len(PROMPT) - 1


def test_who_has_most_entries_makes_room_for_all_others() -> None:
    with serving(prefix_cache_entries=4) as s:
        first = [70, 71, 72, 73]
        s.ask(first, partition="modest")
        for i in range(12):
            s.ask([i, *PROMPT], partition="greedy")
        assert s.reused(first, partition="modest") == len(first) - 1
        assert s.reused([11, *PROMPT], partition="greedy") == len(PROMPT), "its last ones are kept"
        assert s.reused([8, *PROMPT], partition="greedy") == 0
        for i in range(12):
            s.ask([20 + i, *PROMPT], partition="modest")
        held = Counter(entry.scope for entry in s.runtime.cache.entries)
        assert held == {"modest": 2, "greedy": 2}


@pytest.mark.parametrize("seed", range(4))
def test_each_of_several_partitions_keeps_its_part_of_the_entries(seed: int) -> None:
    rng = random.Random(seed)
    most, names = rng.choice([3, 5, 8]), "abc"[: rng.randint(2, 3)]
    part = most // len(names)
    latest: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
    with serving(prefix_cache_entries=most) as s:
        for i in range(40):
            name = rng.choice("aaaaaaaa" + names)
            tokens = (i, 90 - i, 50)
            s.ask(tokens, 1, partition=name)
            latest[name].append(tokens)
            kept = {(entry.scope, tuple(entry.tokens.tolist())) for entry in s.runtime.cache.entries}
            assert len(kept) <= most
            for each, asked in latest.items():
                assert {(each, tokens) for tokens in asked[-part:]} <= kept
