"""What comes out of a generation: pieces of text, updates, log-probabilities, breakpoints; and what stops it."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from control_bench import PROMPT, Bench, bench, greedy
from fake_executor import WAIT_S, keys_of, logits_after
from fake_text import FakeText

from ggml_engine.control.generation import Generation, Reason, Update
from ggml_engine.control.logprobs import TokenLogprobs, token_logprobs
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.runner import Runner
from ggml_engine.control.session import Session
from ggml_engine.control.step_plan import StepCost, Want, plan_step
from ggml_engine.errors import ClosedError, InputError, OptionError, WouldBlockError

# ---- breakpoints


@pytest.mark.parametrize(
    ("points", "ends"),
    [((4, 8), [4, 8, 9]), ((8, 4, 4), [4, 8, 9]), ((9,), [9]), ((1, 2), [1, 2, 9]), ((100,), [9]), ((), [9])],
)
def test_no_chunk_crosses_a_breakpoint(points: tuple[int, ...], ends: list[int]) -> None:  # R42
    with bench(max_batch_tokens=16) as b:
        session = b.open()
        shown: list[tuple[int, int]] = []
        futures: list[Future[Session | None]] = []

        def on_breakpoint(at: int) -> None:
            shown.append((at, session.position))
            futures.append(session.snapshot_async(at))

        config = greedy(max_tokens=3, prefill_breakpoints=points)
        generation = session.generate_async(PROMPT, config, on_breakpoint=on_breakpoint)
        assert generation.result(WAIT_S)
        assert generation.tokens == b.expected(PROMPT, 3)
        chunks = b.executor.chunks_of(session._state.sequence)
        assert [chunk.stop for chunk in chunks if chunk.start < len(PROMPT)] == ends
        reached = [point for point in sorted(set(points)) if point <= len(PROMPT)]
        assert shown == [(point, point) for point in reached]
        clones = [call.arguments[1] for call in b.executor.calls_of("clone")]
        assert clones == reached
        for point, future in zip(reached, futures, strict=True):
            snapshot = future.result(WAIT_S)
            assert snapshot is not None
            assert b.run(snapshot, [77], 2) == b.expected([*PROMPT[:point], 77], 2)


def test_breakpoints_are_positions_of_the_session() -> None:  # R42
    with bench() as b:
        session = b.session_at()
        pending = session.pending
        shown: list[int] = []
        config = greedy(max_tokens=2, prefill_breakpoints=(4, 9, 10, 12))
        generation = session.generate_async([1, 2, 3, 4], config, on_breakpoint=shown.append)
        assert generation.result(WAIT_S)
        assert shown == [10, 12]
        assert generation.tokens == b.expected([*PROMPT, pending, 1, 2, 3, 4], 2)


# ---- log-probabilities


def log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row.astype(np.float64) - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    with bench() as b:
        session = b.open()
        generation = session.generate(PROMPT, greedy(max_tokens=6, logprobs=3), timeout=WAIT_S)
        history = list(PROMPT)
        assert len(generation.logprobs) == 6
        for token, found in zip(generation.tokens, generation.logprobs, strict=True):
            expected = log_softmax(logits_after(keys_of(history), 97))
            order = np.argsort(-expected, kind="stable")[:3]
            assert found.token == token
            assert found.logprob == pytest.approx(expected[token], abs=1e-12)
            assert [t for t, _ in found.top] == order.tolist()
            assert [p for _, p in found.top] == pytest.approx(expected[order].tolist(), abs=1e-12)
            history.append(token)


def test_prompt_logprobs_cover_all_chunks() -> None:
    with bench(max_batch_tokens=4) as b:
        session = b.open()
        generation = session.generate(PROMPT, greedy(max_tokens=1, prompt_logprobs=2), timeout=WAIT_S)
        found = generation.prompt_logprobs
        assert found[0] is None
        assert len(found) == len(PROMPT)
        for i in range(1, len(PROMPT)):
            expected = log_softmax(logits_after(keys_of(PROMPT[:i]), 97))
            each = found[i]
            assert each is not None
            assert each.token == PROMPT[i]
            assert each.logprob == pytest.approx(expected[PROMPT[i]], abs=1e-12)
            assert [t for t, _ in each.top] == np.argsort(-expected, kind="stable")[:2].tolist()
        assert generation.logprobs == []
        # the pending token of the first turn comes first in the second: what came before it is not known any more
        second = session.generate([3, 4], greedy(max_tokens=1, prompt_logprobs=0), timeout=WAIT_S)
        assert second.prompt_logprobs[0] is None
        expected = log_softmax(logits_after(keys_of([*PROMPT, *generation.tokens]), 97))
        assert second.prompt_logprobs[1] == TokenLogprobs(3, pytest.approx(expected[3], abs=1e-12), ())


def test_rows_for_prompt_logprobs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggml_engine.control.work._MAX_LOGIT_BYTES", 4 * 97 * 3)
    with bench() as b:
        session = b.open()
        generation = session.generate(PROMPT, greedy(max_tokens=1, prompt_logprobs=0), timeout=WAIT_S)
        chunks = b.executor.chunks_of(session._state.sequence)
        assert [chunk.n_outputs for chunk in chunks] == [3, 3, 3]
        assert len([each for each in generation.prompt_logprobs if each]) == len(PROMPT) - 1


def test_rows_for_prompt_logprobs_are_not_kept() -> None:
    with bench(max_batch_tokens=4) as b:
        rows: list[weakref.ref[Any]] = []

        def noted(logits: Any) -> Any:
            rows.append(weakref.ref(logits if logits.base is None else logits.base))  # who owns the memory
            return logits

        for step in range(4):
            b.executor.fail_forward(noted, step)
        session = b.open()
        with b.executor.holding_forward(after=4) as gate:
            generation = session.generate_async(PROMPT, greedy(prompt_logprobs=1), max_tokens=9)
            gate.wait_held()  # the prompt was read in three steps, and one decoded
            assert [row() for row in rows[:3]] == [None] * 3
        assert generation.result(WAIT_S)
        assert len(generation.prompt_logprobs) == len(PROMPT)


def test_equally_likely_tokens_come_in_order() -> None:
    row = np.array([1, 3, 3, 0, 3, 1], np.float32)
    assert [token for token, _ in token_logprobs(row, 0, 4).top] == [1, 2, 4, 0]
    assert [token for token, _ in token_logprobs(row, 0, 2).top] == [1, 2]
    assert [token for token, _ in token_logprobs(row, 0, 60).top] == [1, 2, 4, 0, 5, 3]


def test_logprobs_of_logits_that_are_far_apart_are_finite() -> None:
    row = np.array([1e30, -1e30, 0, -np.inf], np.float32)
    assert token_logprobs(row, 0, 1).logprob == 0.0
    assert token_logprobs(row, 3, 0).logprob == -np.inf


# ---- fairness


def test_decodes_come_first_and_prefills_share_the_rest() -> None:
    wants = [Want(100, 100, False), Want(1, 1, True), Want(3, 3, False), Want(100, 100, False), Want(1, 1, True)]
    for turn in range(5):
        taken = plan_step(wants, 64, 1000, turn)
        assert (taken[1], taken[4], taken[2]) == (1, 1, 3)
        assert sum(taken) == 64
        assert abs(taken[0] - taken[3]) <= 1


def test_prefills_are_held_to_the_budget_only_beside_decodes() -> None:
    prefills = [Want(100, 100, False), Want(100, 100, False)]
    assert sum(plan_step([*prefills, Want(1, 1, True)], 512, 16, 0)) == 17
    assert sum(plan_step(prefills, 512, 16, 0)) == 200


def test_limits_are_kept() -> None:
    assert plan_step([Want(100, 4, False), Want(100, 100, False)], 64, 64, 0) == [4, 60]
    assert plan_step([], 64, 64, 3) == []
    assert plan_step([Want(5, 5, False)], 1, 8, 7) == [1]


@pytest.mark.parametrize(("n_decodes", "n_prefills"), [(100, 0), (100, 3), (0, 100), (64, 1), (63, 200), (2, 2)])
def test_nobody_waits_for_ever(n_decodes: int, n_prefills: int) -> None:
    wants = [Want(1, 1, True)] * n_decodes + [Want(1000, 1000, False)] * n_prefills
    served = [0] * len(wants)
    turns = 4 * len(wants)
    for turn in range(turns):
        taken = plan_step(wants, 64, 32, turn)
        assert sum(taken) <= 64
        assert all(n <= want.n for n, want in zip(taken, wants, strict=True))
        served = [before + bool(n) for before, n in zip(served, taken, strict=True)]
    assert min(served) > 0
    for part in (served[:n_decodes], served[n_decodes:]):
        assert not part or max(part) - min(part) <= 64, "those that are alike are served alike"


@pytest.mark.parametrize("n_prefills", [0, 2])
@pytest.mark.parametrize("most", [1, 3, 7, 12])
def test_no_more_decode_in_a_step_than_may_and_all_get_as_many_turns(most: int, n_prefills: int) -> None:
    wants = [Want(1, 1, True)] * 7 + [Want(1000, 1000, False)] * n_prefills
    served = [0] * 7
    for turn in range(7 * 4):
        taken = plan_step(wants, 64, 32, turn, most)
        assert sum(taken[:7]) == min(most, 7)
        assert sum(taken[7:]) == (32 if n_prefills else 0), "prefills get what they got beside all"
        served = [before + n for before, n in zip(served, taken, strict=False)]
    assert set(served) == {4 * min(most, 7)}


def test_decodes_that_take_turns_come_to_the_same_tokens() -> None:
    with bench(RunnerOptions(max_decode_sequences=2)) as b:
        sessions = [b.open() for _ in range(5)]
        running = b.start_together(sessions, 6)
        for i, generation in enumerate(running, 1):
            assert generation.wait(WAIT_S)
            assert generation.reason is Reason.LENGTH, generation.error
            assert generation.tokens == b.expected([i], 6)
        rows = [sum(chunk.start > 0 for chunk in forward.chunks) for forward in b.executor.forwards]
        assert max(rows) == 2, rows
        assert sum(rows) == 5 * 5  # the first token of each is the prompt's


@pytest.mark.parametrize("n", [0, -1, True, 1.5])
def test_no_session_decoding_is_no_bound(n: object) -> None:
    with pytest.raises(OptionError, match="max_decode_sequences must be a positive integer"):
        RunnerOptions(max_decode_sequences=n)  # type: ignore[arg-type]


def test_a_prompt_comes_in_although_streams_fill_every_step() -> None:
    with bench(max_batch_tokens=4) as b:
        sessions = [b.open() for _ in range(6)]
        late = b.open()
        with b.executor.holding_forward(after=12) as gate:
            running = [b.start(session, [i + 1], 60) for i, session in enumerate(sessions)]
            gate.wait_held()
            prompt = b.start(late, PROMPT, 1)
        assert prompt.result(WAIT_S)
        assert prompt.tokens == b.expected(PROMPT, 1)
        for i, generation in enumerate(running):
            assert generation.result(WAIT_S)
            assert generation.tokens == b.expected([i + 1], 60)
        position = max(i for i, f in enumerate(b.executor.forwards) if f.chunk_of(late._state.sequence))
        last = max(i for i, f in enumerate(b.executor.forwards) if f.chunk_of(sessions[0]._state.sequence))
        assert position < last, "the prompt came in after the streams had ended"


def test_the_budget_follows_what_steps_cost() -> None:
    cost = StepCost()
    assert cost.prefill_budget() == 32
    cost.note(0, 100, 0.1)  # 1 ms a token
    assert cost.prefill_budget() == 80  # 120 ms at 1.5 ms each
    cost.note(4, 0, 0.02)
    assert cost.prefill_budget() == 88  # 160 ms less the 20 of the decodes, at 1.5 ms
    cost.note(4, 10, 0.02 + 0.1)  # 10 ms each beside decodes
    assert cost.prefill_budget() == 8
    for _ in range(50):
        cost.note(4, 100, 0.02 + 0.1)
    assert cost.prefill_budget() == 136  # 140 ms at 1 ms, in eights
    cost.note(4, 10, 0.0)  # a clock that stands still
    assert cost.prefill_budget() > 0


# ---- stops


@pytest.mark.parametrize("cut", [(0, 4), (1, 6), (3, 9), (2, 3)])
def test_a_stop_string_across_tokens_ends_it_and_is_not_shown(cut: tuple[int, int]) -> None:
    with bench() as b:
        session = b.open()
        tokens = b.expected(PROMPT, 20)
        text = b.text.shown(tokens)
        stop = text[cut[0] : cut[1] + 1]
        pieces: list[str] = []
        generation = session.generate_async(
            PROMPT, greedy(stop=["zzz", stop]), lambda update: pieces.append(update.text), max_tokens=20
        )
        assert generation.result(WAIT_S) == text[: text.index(stop)] == "".join(pieces)
        assert generation.reason is Reason.STOP
        assert generation.stats.stopped_by == stop
        n = len(generation.tokens)
        assert stop in b.text.shown(tokens[:n])
        assert stop not in b.text.shown(tokens[: n - 1])
        assert session.pending == tokens[n - 1]


def test_what_might_become_a_stop_string_is_shown_when_it_does_not() -> None:
    with bench() as b:
        session = b.open()
        text = b.text.shown(b.expected(PROMPT, 6))
        generation = session.generate_async(PROMPT, greedy(stop=[text[-4:] + "!"]), max_tokens=6)
        assert generation.result(WAIT_S) == text
        assert generation.reason is Reason.LENGTH


def test_a_stop_token_ends_it_and_is_not_shown() -> None:
    with bench() as b:
        tokens = b.expected(PROMPT, 6)
        session = b.open()
        generation = session.generate_async(PROMPT, greedy(stop_tokens={tokens[3]}), max_tokens=6)
        n = tokens.index(tokens[3]) + 1
        assert generation.result(WAIT_S) == b.text.shown(tokens[: n - 1])
        assert generation.reason is Reason.STOP
        assert generation.stats.stopped_by is None
        assert generation.tokens == tokens[:n]


def test_hidden_tokens_have_text_where_they_are_to_be_shown() -> None:
    with bench() as b:
        tokens = b.expected(PROMPT, 6)
        b.text.hidden = frozenset({tokens[1], tokens[3]})
        sessions = [b.open(), b.open()]
        hidden, shown = (
            session.generate_async(PROMPT, greedy(shown_tokens=ids), max_tokens=6)
            for session, ids in zip(sessions, (set(), {tokens[1]}), strict=True)
        )
        assert hidden.result(WAIT_S) == "".join(f"<{token}>" for token in tokens if token not in b.text.hidden)
        assert shown.result(WAIT_S) == "".join(f"<{token}>" for token in tokens if token != tokens[3])
        assert hidden.tokens == shown.tokens == tokens


def test_a_stop_string_may_begin_and_end_in_shown_tokens() -> None:
    with bench() as b:
        tokens = b.expected(PROMPT, 6)
        b.text.hidden = frozenset({tokens[1], tokens[3]})
        stop = f"{tokens[1]}><{tokens[2]}><"
        session = b.open()
        generation = session.generate_async(PROMPT, greedy(shown_tokens=b.text.hidden, stop=[stop]), max_tokens=6)
        assert generation.result(WAIT_S) == f"<{tokens[0]}><"
        assert generation.reason is Reason.STOP
        assert generation.tokens == tokens[:4]


@pytest.mark.parametrize("bad", [{-1}, {"a"}, {True}, {1.5}, range(4097)])
def test_shown_tokens_are_ids_of_tokens(bad: Any) -> None:
    with pytest.raises(OptionError, match="shown"):
        greedy(shown_tokens=bad)


def test_an_end_token_ends_it_unless_it_is_to_be_ignored() -> None:
    with bench() as b:
        tokens = b.expected(PROMPT, 6)
        b.text.ends = {tokens[2]}
        n = tokens.index(tokens[2]) + 1
        ended = b.open().generate(PROMPT, greedy(), max_tokens=6, timeout=WAIT_S)
        assert ended.reason is Reason.FINISHED
        assert ended.tokens == tokens[:n]
        assert ended.text == b.text.shown(tokens[: n - 1])
        ignored = b.open().generate(PROMPT, greedy(ignore_eos=True), max_tokens=6, timeout=WAIT_S)
        assert ignored.reason is Reason.LENGTH
        assert ignored.tokens == tokens
        assert ignored.text == b.text.shown(tokens)


@pytest.mark.parametrize("how", ["cancel", "length"])
def test_text_that_was_held_back_is_shown_at_the_end_to_everybody(how: str) -> None:
    text = FakeText()
    text.last_piece = "~"
    with bench(text=text) as b:
        session = b.open()
        stop = b.text.shown(b.expected(PROMPT, 3))[:-1] + "!"  # all that comes may begin it
        pieces: list[str] = []
        made: list[Generation] = []

        def on_update(update: Update) -> None:
            pieces.append(update.text)
            if how == "cancel" and len(made[0].tokens) == 3:
                made[0].cancel()

        with b.executor.holding_forward() as gate:
            limit = 3 if how == "length" else 50
            made.append(session.generate_async(PROMPT, greedy(stop=[stop]), on_update, max_tokens=limit))
            gate.wait_held()
        assert made[0].wait(WAIT_S)
        shown = b.text.shown(made[0].tokens)
        assert made[0].text == shown
        assert "".join(pieces) == shown
        assert "".join(made[0]) == shown


def test_text_that_was_held_back_is_shown_when_the_context_is_full() -> None:
    with bench(capacity=len(PROMPT) + 3) as b:
        expected = b.expected(PROMPT, 4)  # three are committed, and one waits
        stop = b.text.shown(expected) + "!"  # all that comes may begin it
        session = b.open()
        generation = session.generate_async(PROMPT, greedy(stop=[stop]))
        assert generation.wait(WAIT_S)
        assert generation.reason is Reason.LENGTH
        assert generation.tokens == expected
        assert generation.text == b.text.shown(expected)
        assert "".join(generation) == generation.text


# ---- waiting


def test_pieces_come_as_they_are_made() -> None:
    with bench() as b:
        session = b.open()
        with b.executor.holding_forward() as gate:
            generation = b.start(session, PROMPT, 3)
            gate.wait_held()
            pieces = iter(generation)
            gate.step()
            assert next(pieces) == b.text.shown(b.expected(PROMPT, 1))
            gate.step()
            assert next(pieces) == b.text.shown(b.expected(PROMPT, 2)[1:])
            gate.release()
            assert list(pieces) == [b.text.shown(b.expected(PROMPT, 3)[2:])]
        assert list(generation) == []


def test_updates_are_all_that_happened_for_anyone_who_asks() -> None:
    with bench(max_batch_tokens=4) as b:
        session = b.open()
        generation = b.start(session, PROMPT, 3)
        for _ in range(2):
            updates = list(generation.updates())
            progress = [(each.prefill.done, each.prefill.total) for each in updates if each.prefill]
            assert progress == [(0, 9), (4, 9), (8, 9), (9, 9)]
            assert [each.tokens[0] for each in updates if each.tokens] == b.expected(PROMPT, 3)


def test_it_can_be_iterated_by_a_loop() -> None:
    async def collect(b: Bench) -> None:
        session = await asyncio.wait_for(b.runner.open_session_async(), WAIT_S)
        generation = b.start(session, PROMPT, 8)
        pieces = []

        async def read() -> None:
            async for piece in generation:
                pieces.append(piece)

        await asyncio.wait_for(read(), WAIT_S)
        assert "".join(pieces) == b.text.shown(b.expected(PROMPT, 8))
        child = await asyncio.wait_for(session.clone_async(4), WAIT_S)
        assert child is not None
        assert await asyncio.wait_for(child.rewind_async(2), WAIT_S) == 2
        failed = b.start(child, [])
        with pytest.raises(InputError, match="nothing to generate from"):
            await asyncio.wait_for(anext(aiter(failed)), WAIT_S)

    with bench() as b:
        asyncio.run(collect(b))


def test_many_generations_in_one_loop() -> None:
    async def read(generation: Generation) -> str:
        return "".join([piece async for piece in generation])

    async def collect(b: Bench) -> list[str]:
        sessions = [await asyncio.wait_for(b.runner.open_session_async(), WAIT_S) for _ in range(10)]
        running = [b.start(session, [i + 1], 12) for i, session in enumerate(sessions)]
        return await asyncio.wait_for(asyncio.gather(*map(read, running)), WAIT_S)

    with bench() as b:
        texts = asyncio.run(collect(b))
        assert texts == [b.text.shown(b.expected([i + 1], 12)) for i in range(10)]


def test_a_loop_that_is_gone_does_not_harm_the_thread() -> None:
    async def abandon(b: Bench, generation: Generation) -> None:
        async for _ in generation:
            break

    with bench() as b:
        session = b.open()
        with b.executor.holding_forward(after=1) as gate:
            generation = b.start(session, PROMPT, 6)
            asyncio.run(asyncio.wait_for(abandon(b, generation), WAIT_S))
            gate.wait_held()
        assert generation.result(WAIT_S)
        assert generation.tokens == b.expected(PROMPT, 6)


def test_a_wait_ends_at_its_timeout() -> None:
    with bench() as b:
        session = b.open()
        with b.executor.holding_forward() as gate:
            generation = b.start(session, PROMPT, 3)
            gate.wait_held()
            assert not generation.wait(0.01)
            assert not generation.wait(0)
            with pytest.raises(TimeoutError):
                generation.result(0.01)
            with pytest.raises(TimeoutError):
                b.runner.open_session(0.01)
            with pytest.raises(TimeoutError):
                session.clone_async(1).result(0.01)
        assert generation.wait(WAIT_S)
        assert generation.result(0) == b.text.shown(b.expected(PROMPT, 3))


def test_a_wait_ends_at_its_timeout_although_tokens_keep_coming() -> None:
    with bench(capacity=1 << 20) as b:
        session = b.open()
        generation = b.start(session, PROMPT, None)
        assert not generation.wait(0.3), "a stream of a million tokens cannot have ended"
        assert generation.tokens, "nothing came meanwhile"
        generation.cancel()
        assert generation.wait(WAIT_S)


def test_generate_with_a_timeout_cancels_what_it_leaves() -> None:
    with bench() as b:
        session = b.open()
        # the thread may be cancelled before the forward or in it: nothing has to be held
        b.executor.forward_gate.close()
        with pytest.raises(TimeoutError) as raised:
            session.generate(PROMPT, greedy(max_tokens=3), timeout=0.01)
        b.executor.forward_gate.release()
        b.drain()
        assert not session.is_busy
        assert b.runner.stats()["cancelled"] == 1
        assert raised.tb, "who keeps the traceback, as a prompt of Python's does, keeps the frames"


WAITS: dict[str, Callable[[Runner, Session, Generation], object]] = {
    "open_session": lambda r, _s, _g: r.open_session(WAIT_S),
    "open_session_async().result": lambda r, _s, _g: r.open_session_async().result(WAIT_S),
    "open_session_async().exception": lambda r, _s, _g: r.open_session_async().exception(WAIT_S),
    "generate": lambda _r, s, _g: s.generate([1], timeout=WAIT_S),
    "clone": lambda _r, s, _g: s.clone_async(1).result(WAIT_S),
    "snapshot": lambda _r, s, _g: s.snapshot_async(1).result(WAIT_S),
    "rewind": lambda _r, s, _g: s.rewind_async(0).result(WAIT_S),
    "wait": lambda _r, _s, g: g.wait(WAIT_S),
    "result": lambda _r, _s, g: g.result(WAIT_S),
    "iterate": lambda _r, _s, g: list(g),
    "updates": lambda _r, _s, g: list(g.updates()),
}


@pytest.mark.parametrize("name", WAITS)
def test_whatever_waits_refuses_to_in_a_callback(name: str) -> None:  # R13
    with bench() as b:
        session, other = b.open(), b.open()
        errors: list[BaseException] = []
        made: list[Generation] = []

        def on_update(update: Update) -> None:
            if update.tokens and not errors:
                try:
                    WAITS[name](b.runner, session, made[0])
                except WouldBlockError as error:
                    errors.append(error)

        with b.executor.holding_forward() as gate:
            made.append(b.start(other, PROMPT, 4, on_update=on_update))
            gate.wait_held()
        assert made[0].wait(WAIT_S)
        assert made[0].reason is Reason.LENGTH, made[0].error
        assert len(errors) == 1, "it did not refuse to wait"
        assert made[0].tokens == b.expected(PROMPT, 4)


def test_what_is_over_can_be_read_in_a_callback() -> None:  # R13
    with bench() as b:
        session, other = b.session_at(), b.open()
        over = session.generate([1], greedy(max_tokens=2), timeout=WAIT_S)
        clone = session.clone_async(2)
        assert clone.result(WAIT_S)
        read: list[object] = []

        def on_update(update: Update) -> None:
            read.extend([over.result(WAIT_S), clone.result(WAIT_S)])

        assert b.start(other, PROMPT, 1, on_update=on_update).wait(WAIT_S)
        assert read[0] == over.text


def test_another_thread_is_not_taken_for_the_engines_after_its_end() -> None:  # R13
    with bench() as b:
        assert b.runner.shutdown(WAIT_S)
        seen: list[BaseException] = []

        def ask() -> None:
            try:
                b.runner.open_session(WAIT_S)
            except Exception as error:
                seen.append(error)

        for _ in range(20):  # ids of threads are used again at once
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(WAIT_S)
        assert len(seen) == 20
        assert all(isinstance(error, ClosedError) for error in seen), seen


def test_who_waits_for_the_end_is_not_woken_by_every_token_and_who_reads_is() -> None:
    with bench() as b:
        woken: list[int] = []
        generation = b.open().generate_async(PROMPT, greedy(), max_tokens=6)
        generation.wait(WAIT_S)
        state = generation._state
        notify = state._changed.notify_all
        state._changed.notify_all = lambda: (woken.append(1), notify())[1]  # type: ignore[method-assign]
        state.stats.reason = None  # as if it still ran
        state.publish(Update(tokens=(1,), text="a"))
        assert not woken
        is_waiting = threading.Event()
        wait = state._changed.wait
        state._changed.wait = lambda timeout=None: (is_waiting.set(), wait(timeout))[1]  # type: ignore[method-assign]
        reader = threading.Thread(target=state.wait, args=(len(state.updates), WAIT_S))
        reader.start()
        assert is_waiting.wait(WAIT_S)
        state.publish(Update(tokens=(2,), text="b"))
        reader.join(WAIT_S)
        assert not reader.is_alive()
        assert woken == [1]
        state.stats.reason = Reason.LENGTH
