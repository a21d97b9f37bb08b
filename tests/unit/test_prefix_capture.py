"""Capturing snapshots while a session generates, on an executor without a model. `R` numbers: rules of the contract."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from control_bench import PROMPT, Bench, assert_failed, bench, greedy
from fake_executor import WAIT_S
from prefix_bench import answer, keys, look, put

from ggml_engine.control.capture import PromptCapture
from ggml_engine.control.generation import Generation, Reason, Update
from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.prefix_match import Lookup
from ggml_engine.control.session import Session
from ggml_engine.errors import WouldBlockError


def captured(
    b: Bench, cache: PrefixCache, tokens: list[int], n: int = 4, **options: Any
) -> tuple[Session, PromptCapture, Generation]:
    """A generation after `tokens` in a new session, with all that a capture can take, ended well."""
    session = b.open()
    capture = cache.capture_prompt(session, tokens)
    generation = session.generate_async(
        tokens,
        greedy(max_tokens=n, **options),
        capture.wrap(),
        on_breakpoint=capture.observer,
        on_settled=capture.at_end(),
    )
    assert generation.result(WAIT_S)
    assert generation.tokens == b.expected(tokens, n)
    return session, capture, generation


def test_one_snapshot_is_asked_for_before_the_first_token_is_shown() -> None:  # R29
    with bench() as b:
        cache = PrefixCache(4)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        seen: list[tuple[int, int, int]] = []

        def on_update(update: Update) -> None:
            seen.append((len(update.tokens), len(capture._asked), len(b.executor.calls_of("clone"))))

        assert b.start(session, PROMPT, 3, on_update=capture.wrap(on_update)).wait(WAIT_S)
        assert seen == [(0, 0, 0), (0, 0, 0), (1, 1, 0), (1, 1, 1), (1, 1, 1)]
        (clone,) = b.executor.calls_of("clone")
        assert clone.arguments[1] == len(PROMPT)
        assert clone.n_forwards == 1, "a forward came before the snapshot"
        assert capture.collect(timeout=WAIT_S)
        assert keys(cache) == [PROMPT]


def test_updates_without_tokens_ask_for_nothing() -> None:  # R29
    with bench() as b:
        cache = PrefixCache(4)
        session = b.session_at()
        capture = cache.capture_prompt(session, PROMPT)
        asked: list[int] = []
        wrapped = capture.wrap(lambda _: asked.append(len(capture._asked)))
        for update in (Update(), Update((1,)), Update((2,))):
            wrapped(update)
        assert asked == [0, 1, 1]
        b.drain()
        assert len(b.executor.calls_of("clone")) == 1


def test_a_snapshot_that_is_held_delays_no_callback() -> None:  # R29
    with bench() as b:
        cache = PrefixCache(4)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        shown: list[int] = []
        with b.executor.holding_clone() as gate:
            generation = b.start(session, PROMPT, 3, on_update=capture.wrap(lambda update: shown.extend(update.tokens)))
            gate.wait_held()
            assert shown == b.expected(PROMPT, 1)
            with pytest.raises(TimeoutError):
                capture.collect(timeout=0)
            assert not cache.entries
        assert generation.result(WAIT_S)
        assert capture.collect(timeout=WAIT_S)
        assert keys(cache) == [PROMPT]


def test_a_snapshot_in_a_small_ring_comes_before_the_ring_moves_on() -> None:  # R29 R36
    with bench(ring=4) as b:
        cache = PrefixCache(4)
        _, capture, _ = captured(b, cache, PROMPT, 6)
        assert capture.collect(timeout=WAIT_S)
        assert PROMPT in keys(cache)


def test_what_was_collected_is_collected_once() -> None:  # R30
    with bench() as b:
        cache = PrefixCache(4)
        _, capture, _ = captured(b, cache, PROMPT)
        assert capture.collect(timeout=WAIT_S)
        assert not capture.collect(timeout=WAIT_S)
        assert len(cache) == 2


def test_a_refused_snapshot_does_not_fail_the_generation() -> None:  # R30
    with bench(clones=False) as b:
        cache = PrefixCache(4)
        _, capture, generation = captured(b, cache, PROMPT)
        assert generation.reason is Reason.LENGTH
        assert len(b.executor.calls_of("clone")) == 2
        assert not capture.collect(timeout=WAIT_S)
        assert len(cache) == 0


def test_a_capture_without_a_generation_collects_nothing() -> None:  # R30
    with bench() as b:
        cache = PrefixCache(4)
        capture = cache.capture_prompt(b.open(), PROMPT)
        capture.wrap()
        capture.at_end()
        assert not capture.collect(timeout=WAIT_S)


def test_collecting_in_a_callback_is_an_error_at_once() -> None:  # R33
    with bench() as b:
        cache = PrefixCache(4)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        errors: list[Exception] = []

        def on_settled(generation: Generation) -> None:
            try:
                capture.collect()
            except WouldBlockError as error:
                errors.append(error)

        generation = b.start(session, PROMPT, 2, on_update=capture.wrap(), on_settled=capture.at_end(on_settled))
        assert generation.wait(WAIT_S)
        assert capture.collect(timeout=WAIT_S)
        assert len(errors) == 1
        assert len(cache) == 2


def test_what_a_callback_raises_means_what_it_always_does() -> None:  # R31
    with bench() as b:
        cache = PrefixCache(4)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        shown: list[int] = []

        def on_update(update: Update) -> None:
            shown.extend(update.tokens)
            if len(shown) == 2:
                raise RuntimeError("the window was closed")

        generation = b.start(session, PROMPT, 5, on_update=capture.wrap(on_update), on_settled=capture.at_end())
        assert_failed(generation, "the window was closed")
        assert capture.collect(timeout=WAIT_S)
        assert keys(cache) == [PROMPT], "the end of a generation that failed was captured"
        assert answer(b, cache, [*PROMPT, 1]) == 1


def test_a_cache_that_is_gone_collects_nothing() -> None:  # R32
    with bench() as b:
        cache: PrefixCache | None = PrefixCache(4)
        session, capture, _ = captured(b, cache, PROMPT)  # type: ignore[arg-type]
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed == 3
        cache = None
        assert not capture.collect(timeout=WAIT_S)
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed == 1
        session.close()


def test_a_capture_is_of_the_session_and_not_of_its_handle() -> None:  # R19
    with bench() as b:
        cache = PrefixCache(4)
        session = first = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        session = b.session_at([90, 91])
        assert b.start(first, PROMPT, 3, on_update=capture.wrap()).wait(WAIT_S)
        assert capture.collect(timeout=WAIT_S)
        assert keys(cache) == [PROMPT]
        assert session.tokens == [90, 91]


def test_a_capture_keeps_its_session_not_open() -> None:  # R19
    gc.collect()
    gc.disable()
    try:
        with bench() as b:
            cache = PrefixCache(4)
            session = b.open()
            gone = weakref.ref(session)
            capture = cache.capture_prompt(session, PROMPT)
            wrapped = capture.wrap()
            del session
            assert gone() is None
            b.drain()
            assert b.executor.n_opened == b.executor.n_closed == 1
            wrapped(Update((1,)))
            assert not capture.collect(timeout=WAIT_S)
    finally:
        gc.enable()


def test_breakpoints_give_snapshots_of_the_prompt_up_to_there() -> None:  # R42
    with bench(max_batch_tokens=16) as b:
        cache = PrefixCache(4)
        prompt = list(range(30, 41))
        session = b.open()
        capture = cache.capture_prompt(session, prompt)
        generation = session.generate_async(
            prompt, greedy(max_tokens=3, prefill_breakpoints=(4, 8)), on_breakpoint=capture.observer
        )
        assert generation.wait(WAIT_S)
        assert generation.tokens == b.expected(prompt, 3)
        chunks = b.executor.chunks_of(session._state.sequence)
        assert [chunk.stop for chunk in chunks[:3]] == [4, 8, 11]
        assert [call.arguments[1] for call in b.executor.calls_of("clone")] == [4, 8]
        assert [call.n_forwards for call in b.executor.calls_of("clone")] == [1, 2]
        assert capture.collect(timeout=WAIT_S)
        assert keys(cache) == [prompt[:4], prompt[:8]]


def test_a_breakpoint_at_the_end_of_the_prompt_is_no_second_snapshot() -> None:  # R42
    with bench() as b:
        cache = PrefixCache(4)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        config = greedy(max_tokens=3, prefill_breakpoints=(9,))
        generation = session.generate_async(PROMPT, config, capture.wrap(), on_breakpoint=capture.observer)
        assert generation.wait(WAIT_S)
        assert len(b.executor.calls_of("clone")) == 1
        assert capture.collect(timeout=WAIT_S)


def test_a_cancelled_prefill_shows_no_checkpoint() -> None:  # R59
    with bench(max_batch_tokens=4) as b:
        cache = PrefixCache(4)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        with b.executor.holding_forward() as gate:
            generation = session.generate_async(
                PROMPT, greedy(prefill_breakpoints=(4,)), capture.wrap(), on_breakpoint=capture.observer
            )
            gate.wait_held()
            generation.cancel()
        assert generation.wait(WAIT_S)
        assert generation.reason is Reason.CANCELLED
        assert not capture.collect(timeout=WAIT_S)
        assert not b.executor.calls_of("clone")


# ---- the end of a generation


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_next_turn_reads_nothing_again(n: int) -> None:  # R40
    with bench() as b:
        cache = PrefixCache(4)
        session, capture, generation = captured(b, cache, PROMPT, n)
        session.close()
        assert capture.collect(timeout=WAIT_S)
        reply = generation.tokens
        assert keys(cache)[-1] == [*PROMPT, *reply[:-1]]
        assert answer(b, cache, [*PROMPT, *reply, 70, 71, 72]) == 1 + 3  # the pending token, and what is new


def test_a_reply_that_was_cancelled_is_captured() -> None:
    with bench() as b:
        cache = PrefixCache(4)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)

        def on_update(update: Update) -> None:
            if len(generations[0].tokens) == 3:
                generations[0].cancel()

        generations: list[Generation] = []
        with b.executor.holding_forward() as gate:
            generations.append(
                b.start(session, PROMPT, 50, on_update=capture.wrap(on_update), on_settled=capture.at_end())
            )
            gate.wait_held()
        assert generations[0].wait(WAIT_S)
        assert generations[0].reason is Reason.CANCELLED
        assert capture.collect(timeout=WAIT_S)
        assert keys(cache) == [PROMPT, [*PROMPT, *b.expected(PROMPT, 2)]]


def test_a_generation_that_was_shut_down_is_not_captured() -> None:
    with bench() as b:
        cache = PrefixCache(4)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        with b.executor.holding_forward(after=2) as gate:
            generation = b.start(session, PROMPT, 50, on_update=capture.wrap(), on_settled=capture.at_end())
            gate.wait_held()
            assert b.runner.shutdown(WAIT_S)
        assert generation.reason is Reason.SHUTDOWN
        assert not capture.collect(timeout=WAIT_S)
        assert len(cache) == 0


def test_whoever_waited_for_the_generation_finds_its_end(monkeypatch: pytest.MonkeyPatch) -> None:  # R30
    with bench() as b:
        cache = PrefixCache(4)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        is_asked = threading.Event()
        ask = capture._link.barrier_async

        def asked() -> object:
            is_asked.set()
            return ask()

        monkeypatch.setattr(capture._link, "barrier_async", asked)
        with b.executor.holding_forward() as gate:
            generation = b.start(session, PROMPT, 1, on_settled=capture.at_end())
            gate.wait_held()

            def hold_the_end() -> None:  # on the engine's thread, after the end was told and before on_settled
                if generation.reason is not None:
                    is_asked.wait(WAIT_S)

            listening = generation._state.listening(hold_the_end)
            listening.__enter__()
        try:
            assert generation.wait(WAIT_S)
            assert capture.collect(timeout=WAIT_S)
        finally:
            is_asked.set()
            listening.__exit__(None, None, None)
        assert keys(cache) == [PROMPT]


# ---- dropping, and what need not be captured


def test_no_flag_makes_collecting_discard() -> None:  # R91
    assert list(inspect.signature(PromptCapture.collect).parameters) == ["self", "metadata", "timeout"]
    assert list(inspect.signature(PromptCapture.discard).parameters) == ["self"]


def test_discarding_lets_go_and_captures_nothing_more() -> None:  # R91
    with bench() as b:
        cache = PrefixCache(4)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        drop: list[Callable[[], None]] = [capture.discard]

        def on_update(update: Update) -> None:
            if update.tokens and drop:
                drop.pop()()

        generation = b.start(session, PROMPT, 4, on_update=capture.wrap(on_update), on_settled=capture.at_end())
        assert generation.result(WAIT_S)
        assert not drop
        assert not capture.collect(timeout=WAIT_S)
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed == 1
        assert len(cache) == 0
        _, taken, _ = captured(b, cache, PROMPT)
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed >= 3
        taken.discard()
        assert not taken.collect(timeout=WAIT_S)
        assert len(cache) == 0


def test_a_capture_that_is_dropped_lets_go() -> None:
    with bench() as b:
        session, capture, generation = captured(b, PrefixCache(4), PROMPT)
        b.drain()
        del capture, generation
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed == 1
        session.close()


def test_a_prompt_that_is_saved_is_not_cloned_again() -> None:  # R78
    with bench() as b:
        cache = PrefixCache(2)
        for i in range(5):
            session = b.open()
            capture = cache.capture_prompt(session, PROMPT)
            assert b.start(session, PROMPT, 2, on_update=capture.wrap()).result(WAIT_S)
            assert capture.collect(timeout=WAIT_S)
            assert len(b.executor.calls_of("clone")) == 1
            if i == 2:
                assert put(b, cache, [1, 2])
                b.executor.calls.clear()
                look(b, cache, PROMPT)
        assert keys(cache) == [[1, 2], PROMPT]


def test_a_snapshot_serves_while_its_source_still_decodes() -> None:  # R92
    with bench() as b:
        cache = PrefixCache(4)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        found: list[Lookup] = []
        with b.executor.holding_forward(after=2) as gate:
            generation = b.start(session, PROMPT, 8, on_update=capture.wrap())
            gate.wait_held()
            assert capture.collect(timeout=WAIT_S)  # the snapshot is there: nothing waits for the forward that is held
            other = threading.Thread(target=lambda: found.append(look(b, cache, PROMPT)))
            other.start()
            while other.is_alive():  # its clone comes between two forwards, of which every one is held
                gate.release_one()
                other.join(0.05)
            n_shown = len(generation.tokens)
        assert found[0].n_reused == len(PROMPT) - 1
        assert n_shown < 8
        assert generation.result(WAIT_S)
        assert generation.tokens == b.expected(PROMPT, 8)
