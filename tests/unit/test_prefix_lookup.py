"""Look-ups in a prefix cache, on an executor without a model. `R` numbers are rules of the contract."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from control_bench import PROMPT, Bench, bench, eventually, greedy
from fake_executor import WAIT_S, FakeExecutor
from fake_text import FakeText
from prefix_bench import answer, keys, look, put, snapshot_at

from ggml_engine.control.generation import Update
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.prefix_match import MissReason
from ggml_engine.control.retention import CacheEntry, LeastRecentlyUsed
from ggml_engine.control.runner import Runner
from ggml_engine.errors import InputError, OptionError, WouldBlockError

SIX = [5, 3, 8, 1, 9, 2]
LONG = [(7 * i) % 89 + 1 for i in range(23)]


def test_at_least_the_last_token_is_left_to_be_forwarded() -> None:  # R24
    with bench() as b:
        cache = PrefixCache(4)
        assert put(b, cache, SIX)
        assert look(b, cache, SIX).n_reused == 5
        assert look(b, cache, [*SIX, 7, 4, 6]).n_reused == 6
        assert look(b, cache, SIX[:3]).n_reused == 2
        for prompt in (SIX, [*SIX, 7, 4, 6], SIX[:3], SIX[:2]):
            assert answer(b, cache, prompt) >= 1


@pytest.mark.parametrize("prompt", [[], [5]])
def test_a_prompt_of_one_token_or_none_is_a_miss(prompt: list[int]) -> None:  # R24
    with bench() as b:
        cache = PrefixCache(4)
        assert put(b, cache, SIX)
        n_clones = len(b.executor.calls_of("clone"))
        found = look(b, cache, prompt)
        assert found.miss is not None
        assert found.miss.reason is MissReason.SHORT
        assert len(b.executor.calls_of("clone")) == n_clones


@pytest.mark.parametrize("shared", range(1, 9))
def test_the_match_ends_at_any_token(shared: int) -> None:  # R24
    with bench() as b:
        cache = PrefixCache(4)
        assert put(b, cache, PROMPT)
        prompt = [*PROMPT[:shared], 90, 91, 92]
        assert look(b, cache, prompt).n_reused == shared
        assert answer(b, cache, prompt) == 3


def test_what_was_found_is_a_session_of_its_own() -> None:  # R24
    with bench() as b:
        cache = PrefixCache(4)
        assert put(b, cache, SIX)
        found = [look(b, cache, [*SIX, 40 + i]) for i in range(3)]
        sessions = [each.session for each in found if each.session is not None]
        assert len({session.id for session in sessions}) == 3
        for i, session in enumerate(sessions):
            assert b.run(session, [40 + i], 6) == b.expected([*SIX, 40 + i], 6)
        assert keys(cache) == [SIX]


def test_a_snapshot_serves_no_other_runner_and_no_other_execution() -> None:  # R25
    with bench(fingerprint="one") as b, bench(fingerprint="two") as other, bench(fingerprint="one") as twin:
        cache = PrefixCache(8)
        assert put(b, cache, SIX)
        for each in (other, twin):  # cells lie in one executor, whatever it is called
            found = look(each, cache, [*SIX, 7])
            assert found.miss is not None
            assert found.miss.reason is MissReason.FOREIGN
            assert put(each, cache, SIX)
        assert len(cache) == 3
        for each in (b, other, twin):
            assert answer(each, cache, [*SIX, 7]) == 1
        b.executor._fingerprint = "something else by now"
        missed = look(b, cache, [*SIX, 7]).miss
        assert missed is not None
        assert missed.reason is MissReason.FOREIGN
        b.executor._fingerprint = "one"
        assert look(b, cache, [*SIX, 7]).n_reused == 6


def test_a_refused_snapshot_is_tried_once_and_the_next_one_serves() -> None:  # R26
    with bench() as b:
        cache = PrefixCache(4)
        long = list(range(1, 21))
        assert put(b, cache, long)
        assert put(b, cache, long[:8])
        before = len(b.executor.calls_of("clone"))
        b.executor.fail_clone(RuntimeError("no"))
        assert look(b, cache, [*long, 50]).n_reused == 8
        tried = b.executor.calls_of("clone")[before:]
        assert [call.arguments[1] for call in tried] == [20, 8]
        assert len({call.arguments[0] for call in tried}) == 2


def test_of_equal_matches_the_one_used_last_is_tried_first() -> None:  # R26
    with bench() as b:
        cache = PrefixCache(4)
        for last in (60, 61, 62):
            assert put(b, cache, [*SIX, last])
        assert look(b, cache, [*SIX, 61, 1]).n_reused == 7  # 61 is the most recent one now
        sequences = {entry.tokens[-1]: entry.snapshot._state.sequence for entry in cache.entries}
        before = len(b.executor.calls_of("clone"))
        b.executor.fail_clone(RuntimeError("no"))
        b.executor.fail_clone(RuntimeError("no"), at=1)
        assert look(b, cache, [*SIX, 70]).n_reused == 6
        tried = [call.arguments[0] for call in b.executor.calls_of("clone")[before:]]
        assert tried == [sequences[61], sequences[62], sequences[60]]


def test_where_every_snapshot_is_refused_the_look_up_says_so() -> None:  # R26
    with bench(RunnerOptions(max_sessions=3)) as b:
        cache = PrefixCache(4)
        assert put(b, cache, SIX)
        held = [b.open(), b.open()]
        missed = look(b, cache, [*SIX, 7]).miss
        assert missed is not None
        assert missed.reason is MissReason.REFUSED
        held[0].close()
        assert look(b, cache, [*SIX, 7]).n_reused == 6


def test_a_look_up_in_a_callback_is_an_error_at_once() -> None:  # R33
    with bench() as b:
        cache = PrefixCache(4)
        assert put(b, cache, SIX)
        errors: list[Exception] = []

        def on_update(update: Update) -> None:
            for call in (
                lambda: cache.lookup(b.runner, SIX),
                lambda: cache.insert(cache.entries[0].snapshot, SIX),
                cache.n_bytes,
            ):
                try:
                    call()
                except WouldBlockError as error:
                    errors.append(error)

        session = b.open()
        assert b.start(session, PROMPT, 2, on_update=on_update).wait(WAIT_S)
        assert len(errors) >= 3
        assert len(errors) % 3 == 0
        assert look(b, cache, SIX).n_reused == 5


def test_two_threads_never_tear_the_list() -> None:  # R33
    with bench(capacity=4096) as b:
        cache = PrefixCache(3)
        prompts = [[10 + i, 2, 3, 4, 5] for i in range(5)]
        trunks = [b.session_at(prompt) for prompt in prompts]
        wrong: list[BaseException | str] = []

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(500):
                    which = int(random.integers(5))
                    found = cache.lookup(b.runner, [*prompts[which], 9], WAIT_S)
                    if found.session is not None:
                        if found.session.tokens != prompts[which][: found.n_reused]:
                            wrong.append("foreign tokens")
                        found.session.close()
                    snapshot = trunks[which].snapshot_async().result(WAIT_S)
                    if snapshot is not None:
                        cache.insert(snapshot, prompts[which], which, WAIT_S)
                    if len(cache) > 3:
                        wrong.append("too many entries")
                    if random.integers(50) == 0:
                        cache.clear()
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not wrong, wrong[:3]
        assert cache.stats()["lookups"] == 1000
        assert cache.stats()["hits"] > 100
        assert len({tuple(key) for key in keys(cache)}) == len(cache) <= 3


def test_nobody_changes_the_list_while_a_policy_chooses() -> None:  # R33
    with bench() as b:
        cleared = threading.Event()
        came_between: list[bool] = []

        class Slow(LeastRecentlyUsed):
            def victim(self, entries: Sequence[CacheEntry], newcomer: CacheEntry | None) -> CacheEntry | None:
                other.start()
                came_between.append(cleared.wait(0.2))  # time for what must not come
                return super().victim(entries, newcomer)

        cache = PrefixCache(1, policy=Slow())
        other = threading.Thread(target=lambda: (cache.clear(), cleared.set()))
        assert put(b, cache, [1, 2])
        put(b, cache, [3, 4])
        other.join(WAIT_S)
        assert not other.is_alive()
        assert came_between == [False]
        assert len(cache) <= 1


def test_two_inserts_at_once_keep_the_bound() -> None:  # R33
    with bench() as b:
        others = threading.Event()  # the other insert is under way; it must not come while the first one is

        class Slow(PrefixCache):
            n_inside = 0
            most_inside = 0

            def _fault(self, point: str) -> None:
                if point == "insert":
                    self.n_inside += 1
                    self.most_inside = max(self.most_inside, self.n_inside)
                    if self.n_inside == 2:
                        others.set()
                if point == "retain":
                    others.wait(0.2)  # time for what must not come
                    self.n_inside -= 1

        cache = Slow(1)
        snapshots = [(snapshot_at(b, tokens), tokens) for tokens in ([1, 2], [3, 4])]
        threads = [threading.Thread(target=cache.insert, args=(each, tokens)) for each, tokens in snapshots]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert cache.most_inside == 1
        assert len(cache) == 1


def test_clearing_hurts_no_session_that_was_handed_out() -> None:  # R34
    with bench() as b:
        cache = PrefixCache(2)
        assert put(b, cache, SIX)
        cleared, evicted = look(b, cache, [*SIX, 7]).session, look(b, cache, [*SIX, 8]).session
        assert cleared is not None
        assert evicted is not None
        assert put(b, cache, [20, 21])
        assert put(b, cache, [30, 31])
        assert SIX not in keys(cache)
        assert b.run(evicted, [8], 10) == b.expected([*SIX, 8], 10)
        cache.clear()
        assert not keys(cache)
        assert b.run(cleared, [7], 10) == b.expected([*SIX, 7], 10)


def test_without_entries_nothing_is_cloned() -> None:  # R35
    with bench() as b:
        cache = PrefixCache(0)
        for _ in range(5):
            found = look(b, cache, PROMPT)
            assert found.miss is not None
            assert found.miss.reason is MissReason.DISABLED
            session = b.open()
            capture = cache.capture_prompt(session, PROMPT)
            generation = session.generate_async(
                PROMPT,
                greedy(max_tokens=3, prefill_breakpoints=(4,)),
                capture.wrap(),
                on_breakpoint=capture.observer,
                on_settled=capture.at_end(),
            )
            assert generation.wait(WAIT_S)
            assert generation.tokens == b.expected(PROMPT, 3)
            assert not capture.collect(timeout=WAIT_S)
        assert not b.executor.calls_of("clone")


def test_a_prefix_whose_cells_a_ring_overwrote_is_a_safe_miss() -> None:  # R36
    twelve = list(range(1, 13))
    prompt = [*twelve[:6], 50, 51]
    with bench(ring=4) as b:
        cache = PrefixCache(4)
        assert put(b, cache, twelve)
        found = look(b, cache, prompt)
        assert found.miss is not None
        assert found.miss.reason is MissReason.REFUSED
        assert answer(b, cache, prompt) == len(prompt)
        assert answer(b, cache, [*twelve, 50]) == 1
    with bench() as b:  # where a window only narrows the mask the same prompt hits
        cache = PrefixCache(4)
        assert put(b, cache, twelve)
        assert answer(b, cache, prompt) == 2


def test_equal_last_tokens_after_another_beginning_are_not_reused() -> None:  # R37
    with bench() as b:
        cache = PrefixCache(4)
        assert put(b, cache, [1, *LONG])
        assert answer(b, cache, [2, *LONG]) == len(LONG) + 1


def test_a_prompt_that_comes_again_forwards_one_token() -> None:  # R40
    for prompt in (LONG, [(i * i) % 96 for i in range(1280)]):
        with bench(capacity=4096) as b:
            cache = PrefixCache(4)
            assert put(b, cache, prompt)
            found = look(b, cache, prompt)
            assert found.session is not None
            generation = b.start(found.session, prompt[found.n_reused :], 3)
            assert generation.wait(WAIT_S)
            assert generation.tokens == b.expected(prompt, 3)
            assert generation.stats.evaluated_tokens == 1
            assert generation.stats.reused_tokens == len(prompt) - 1
            first = b.executor.chunks_of(found.session._state.sequence)[0]
            assert (first.start, first.stop) == (len(prompt) - 1, len(prompt))


def test_prompts_that_were_looked_up_before_the_insert_all_miss() -> None:  # R41
    with bench() as b:
        cache = PrefixCache(4)
        assert look(b, cache, PROMPT).session is None
        assert look(b, cache, PROMPT).session is None
        sessions = [b.open(), b.open()]
        captures = [cache.capture_prompt(session, PROMPT) for session in sessions]
        running = [
            b.start(session, PROMPT, 4, on_update=capture.wrap())
            for session, capture in zip(sessions, captures, strict=True)
        ]
        for generation in running:
            assert generation.result(WAIT_S)
            assert generation.tokens == b.expected(PROMPT, 4)
        assert [capture.collect(timeout=WAIT_S) for capture in captures] == [True, True]
        assert keys(cache) == [PROMPT]


# ---- why it missed


def test_the_report_says_where_prompt_and_snapshot_part() -> None:
    with bench() as b:
        cache = PrefixCache(4)
        empty = look(b, cache, LONG).miss
        assert empty is not None
        assert empty.reason is MissReason.EMPTY
        assert put(b, cache, [90, 91])
        assert put(b, cache, LONG)
        changed = [*LONG]
        changed[12] = 95
        found = look(b, cache, changed)
        assert found.n_reused == 12
        miss = found.miss
        assert miss is not None
        assert (miss.reason, miss.position, miss.prompt_token, miss.snapshot_token) == (
            MissReason.DIFFERS,
            12,
            95,
            LONG[12],
        )
        assert miss.prompt_text == b.text.shown(changed[4:20])
        assert miss.snapshot_text == b.text.shown(LONG[4:20])
        assert "<95>" in str(miss)
        assert "token 12" in str(miss)
        nothing = look(b, cache, [77, 78, 79])
        assert nothing.session is None
        assert nothing.miss is not None
        assert (nothing.miss.reason, nothing.miss.position) == (MissReason.DIFFERS, 0)


def test_a_snapshot_that_was_used_whole_is_no_miss() -> None:
    with bench() as b:
        cache = PrefixCache(4)
        assert put(b, cache, SIX)
        for prompt in ([*SIX, 1, 2], SIX, SIX[:4]):
            assert look(b, cache, prompt).miss is None


# ---- what is not a usable look-up, and entries that are gone


@pytest.mark.parametrize("tokens", ["text", [1.5, 2.0], [[1, 2]], [1, 1 << 40]])
def test_what_are_no_tokens_is_an_input_error(tokens: Any) -> None:
    with bench() as b, pytest.raises(InputError):
        PrefixCache(4).lookup(b.runner, tokens, WAIT_S)


@pytest.mark.parametrize(("entries", "n_bytes"), [(-1, None), (True, None), (1.5, None), (1, -1)])
def test_bounds_that_are_none_are_an_option_error(entries: Any, n_bytes: Any) -> None:
    with pytest.raises(OptionError, match="max_"):
        PrefixCache(entries, n_bytes)


def test_an_entry_whose_cells_the_engine_took_is_dropped() -> None:
    with bench(capacity=40) as b:
        cache = PrefixCache(8)
        assert put(b, cache, list(range(1, 17)))
        assert put(b, cache, list(range(20, 36)))
        session = b.open()
        assert b.run(session, list(range(40, 60)), 2) == b.expected(list(range(40, 60)), 2)
        assert keys(cache) == [list(range(20, 36))]
        assert look(b, cache, list(range(1, 17))).session is None
        assert b.executor.n_opened - b.executor.n_closed == 2


def test_a_snapshot_that_somebody_went_on_with_serves_nothing_wrong() -> None:
    with bench() as b:
        cache = PrefixCache(4)
        snapshot = snapshot_at(b, PROMPT)
        assert cache.insert(snapshot, PROMPT, timeout=WAIT_S)
        assert snapshot.rewind_async(4).result(WAIT_S) == 4
        b.run(snapshot, [70, 71, 72, 73, 74, 75], 1)
        assert answer(b, cache, [*PROMPT, 1]) == len(PROMPT) + 1


@pytest.mark.parametrize("first", ["cache", "runner"])
def test_a_cache_makes_no_cycle(first: str) -> None:  # R53
    gc.collect()
    gc.disable()
    try:
        executor = FakeExecutor()
        gone = weakref.ref(executor)
        runner: Runner | None = Runner(executor, FakeText())
        b: Bench | None = Bench(executor, FakeText(), runner)  # type: ignore[arg-type]
        thread = runner._core._thread  # type: ignore[union-attr]
        assert thread is not None
        cache: PrefixCache | None = PrefixCache(4)
        assert put(b, cache, PROMPT)  # type: ignore[arg-type]
        assert look(b, cache, PROMPT).n_reused == 8  # type: ignore[arg-type]
        if first == "cache":
            cache = None
            runner = b = None
        else:
            runner = b = None
            assert thread.is_alive(), "snapshots keep their runner going"
            cache = None
        thread.join(WAIT_S)
        assert not thread.is_alive()
        executor.check_balance()
        del executor
        eventually(lambda: gone() is None, "something keeps the executor")
    finally:
        gc.enable()


def test_after_the_runner_has_stopped_there_is_nothing_to_find() -> None:
    with bench() as b:
        cache = PrefixCache(4)
        assert put(b, cache, SIX)
        assert b.runner.shutdown(WAIT_S)
        assert look(b, cache, [*SIX, 7]).session is None
        assert len(cache) == 0
