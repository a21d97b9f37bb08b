"""Many prompts over one runner: what is looked up, captured and reserved, and what waits for room."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
from control_bench import PROMPT, Bench, bench, eventually, greedy
from fake_executor import WAIT_S

from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Reason
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.prefix_match import MissReason
from ggml_engine.control.rounds import PromptRounds, RoundPrompt, RoundResult, reserved_sessions
from ggml_engine.errors import (
    ChatTemplateError,
    ContextLengthError,
    ExecutorError,
    InputError,
    PoolFullError,
    SessionLimitError,
)
from ggml_engine.ggml.sampler_config import SamplerConfig

N = 5


def prompts_of(n: int, length: int = 9) -> list[RoundPrompt]:
    """Prompts that share nothing."""
    return [
        RoundPrompt([10 + i] + [1 + (i * 7 + k) % 90 for k in range(length - 1)], greedy(max_tokens=N))
        for i in range(n)
    ]


def rounds_over(b: Bench, prompts: Sequence[RoundPrompt], n_entries: int = 0, **options: Any) -> PromptRounds:
    return PromptRounds(b.runner, prompts, n_entries, **options)


def run_round(rounds: PromptRounds) -> list[RoundResult]:
    """A round whose results are in the order of the prompts."""
    found: list[RoundResult] = []
    thread = threading.Thread(target=lambda: found.extend(rounds.run_round()))
    thread.start()
    thread.join(WAIT_S)
    if thread.is_alive():
        rounds.cancel()
        thread.join(WAIT_S)
        raise AssertionError(f"the round does not end; {len(found)} prompts have")
    results = sorted(found, key=lambda result: result.index)
    assert [result.index for result in results] == list(range(len(results)))
    return results


def check_texts(b: Bench, prompts: Sequence[RoundPrompt], results: Sequence[RoundResult]) -> None:
    """Every prompt was answered as a cold run answers it."""
    assert len(results) == len(prompts)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.error is None
        assert result.reason is Reason.LENGTH
        assert result.text == b.text.shown(b.expected(list(prompt.tokens), prompt.config.max_tokens or 0))


def options_for(n_prompts: int, n_entries: int) -> RunnerOptions:
    return RunnerOptions(max_sessions=reserved_sessions(n_prompts, n_entries))


# ---- what is reserved


@pytest.mark.parametrize(
    ("n_prompts", "n_entries", "reserved"),
    [(1, 63, 3), (4, 2, 8), (4, 0, 4), (8, 8, 24), (2, 3, 6)],
)
def test_what_can_be_retained_is_reserved_and_is_enough(n_prompts: int, n_entries: int, reserved: int) -> None:  # R51
    assert reserved_sessions(n_prompts, n_entries) == reserved
    with bench(RunnerOptions(max_sessions=reserved)) as b:
        prompts = prompts_of(n_prompts)
        rounds = rounds_over(b, prompts, n_entries)
        kept = min(n_prompts, n_entries)
        for _ in range(3):
            check_texts(b, prompts, run_round(rounds))
            assert len(rounds.cache) == kept
        b.drain()
        assert b.runner.stats()["sessions"] == kept
        del rounds


def test_less_room_than_is_reserved_fails_one_prompt_and_not_the_others() -> None:  # R51
    with bench(RunnerOptions(max_sessions=2)) as b:
        first, *rest = rounds_over(b, prompts_of(3)).run_round()
        assert (first.index, first.reason) == (2, Reason.FAILED)
        assert isinstance(first.error, SessionLimitError)
        assert [result.reason for result in rest] == [Reason.LENGTH] * 2


# ---- what is reused


def test_the_second_round_evaluates_one_token_of_each_prompt() -> None:  # R40 R58
    with bench(options_for(8, 8)) as b:
        prompts = prompts_of(8)
        rounds = rounds_over(b, prompts, 8)
        first, second = run_round(rounds), run_round(rounds)
        check_texts(b, prompts, first)
        check_texts(b, prompts, second)
        assert [(r.stats.evaluated_tokens, r.stats.reused_tokens) for r in first] == [(9, 0)] * 8
        assert [(r.stats.evaluated_tokens, r.stats.reused_tokens) for r in second] == [(1, 8)] * 8
        assert [r.round for r in (*first, *second)] == [0] * 8 + [1] * 8
        assert all(r.miss is not None and r.miss.reason is MissReason.EMPTY for r in first)
        assert all(r.miss is None for r in second)
        assert b.runner.stats()["prefill_tokens"] == 8 * 9 + 8
        del rounds


def test_without_entries_nothing_is_cloned() -> None:  # R35
    with bench(options_for(3, 0)) as b:
        prompts = prompts_of(3)
        rounds = rounds_over(b, prompts)
        for _ in range(3):
            results = run_round(rounds)
            check_texts(b, prompts, results)
            assert [(r.stats.reused_tokens, r.miss) for r in results] == [(0, None)] * 3
        assert b.executor.calls_of("clone") == []
        assert rounds.cache.stats()["lookups"] == 0


def test_only_as_many_prompts_as_there_are_entries_are_captured_and_these_are_the_first() -> None:
    with bench(options_for(5, 2)) as b:
        prompts = prompts_of(5)
        rounds = rounds_over(b, prompts, 2)
        check_texts(b, prompts, run_round(rounds))
        assert {tuple(entry.tokens.tolist()) for entry in rounds.cache.entries} == {
            tuple(prompt.tokens) for prompt in prompts[:2]
        }
        assert len(b.executor.calls_of("clone")) == 2
        second = run_round(rounds)
        check_texts(b, prompts, second)
        assert [r.stats.evaluated_tokens for r in second] == [1, 1, 9, 9, 9]
        assert rounds.cache.stats()["evicted"] == 0
        del rounds


def test_all_of_a_round_is_looked_up_before_any_of_it_is_kept() -> None:  # R41
    with bench(options_for(3, 3)) as b:
        prompts = [RoundPrompt(PROMPT, greedy(max_tokens=N))] * 3
        rounds = rounds_over(b, prompts, 3, max_running=1)  # one after the other: the first has ended before the next
        first = run_round(rounds)
        check_texts(b, prompts, first)
        assert [r.stats.reused_tokens for r in first] == [0, 0, 0]
        assert len(rounds.cache) == 1
        assert [r.stats.reused_tokens for r in run_round(rounds)] == [8, 8, 8]
        del rounds


# ---- room


def test_prompts_that_do_not_fit_wait_and_none_fails() -> None:
    with bench(options_for(6, 0), capacity=170) as b:
        prompts = prompts_of(6)  # 73 cells each are wanted
        rounds = rounds_over(b, prompts)
        results = run_round(rounds)
        check_texts(b, prompts, results)
        assert max(len(forward.chunks) for forward in b.executor.forwards) == 2
        assert [r.n_restarts for r in results] == [0] * 6


def long_prompts(n: int) -> list[RoundPrompt]:
    """Their answers are longer than what is held free for them."""
    return [RoundPrompt(prompt.tokens, greedy(max_tokens=120)) for prompt in prompts_of(n)]


def test_answers_that_outgrow_the_cells_start_again_and_none_fails() -> None:
    with bench(options_for(4, 0), capacity=300) as b:
        prompts = long_prompts(4)
        results = run_round(rounds_over(b, prompts))
        check_texts(b, prompts, results)
        assert sum(r.n_restarts for r in results) > 0
        restarted = [r for r in results if r.n_restarts]
        assert all(r.queued_s is not None and r.queued_s > 0 for r in restarted)
        assert b.runner.stats()["failed"] == sum(r.n_restarts for r in results)


def test_snapshots_give_way_to_answers() -> None:
    with bench(options_for(4, 4), capacity=300) as b:
        prompts = long_prompts(4)
        rounds = rounds_over(b, prompts, 4)
        for _ in range(3):
            check_texts(b, prompts, run_round(rounds))
        del rounds


def test_what_waiting_prompts_reuse_gives_way_to_one_that_runs_alone() -> None:
    """Four begin after parts of one prompt: together these parts leave too little for any answer."""
    with bench(options_for(4, 4), capacity=160) as b:
        prompts = [RoundPrompt([i + 1] * 35, greedy(max_tokens=1)) for i in range(4)]
        rounds = rounds_over(b, prompts, 4)
        check_texts(b, prompts, run_round(rounds))
        assert len(rounds.cache) == 4
        rounds._prompts = tuple(RoundPrompt(prompt.tokens, greedy(max_tokens=100)) for prompt in prompts)
        results = run_round(rounds)
        check_texts(b, rounds._prompts, results)
        assert sum(r.n_restarts for r in results) > 0
        del rounds


def test_a_prompt_that_no_room_would_help_fails_alone() -> None:
    with bench(options_for(3, 0), capacity=100) as b:
        prompts = prompts_of(3)
        prompts[1] = RoundPrompt([1] * 101, greedy(max_tokens=1))
        results = run_round(rounds_over(b, prompts))
        assert isinstance(results[1].error, ContextLengthError)
        assert [r.reason for r in results] == [Reason.LENGTH, Reason.FAILED, Reason.LENGTH]


def test_a_pool_that_is_full_of_others_fails_and_does_not_start_for_ever() -> None:
    with bench(RunnerOptions(max_sessions=9), capacity=40) as b:
        other = b.session_at([1] * 35)
        (result,) = run_round(rounds_over(b, prompts_of(1)))
        assert isinstance(result.error, PoolFullError)
        assert result.n_restarts == 0
        other.close()


def test_one_at_a_time_needs_one_sequence() -> None:
    with bench(clones=False) as b:
        n_open: list[int] = []
        b.executor.on_forward = lambda _forward: n_open.append(b.executor.n_opened - b.executor.n_closed)
        prompts = prompts_of(4)
        rounds = rounds_over(b, prompts, max_running=1)
        for _ in range(2):
            check_texts(b, prompts, run_round(rounds))
        assert set(n_open) == {1}
        assert b.executor.n_opened == 8


# ---- what goes wrong


def test_a_prompt_that_fails_says_why_and_the_others_go_on() -> None:
    with bench() as b:
        prompts = prompts_of(4)
        prompts[0] = RoundPrompt((), greedy(), ChatTemplateError("no such role"))
        prompts[2] = RoundPrompt([], greedy())
        prompts[3] = RoundPrompt([4000], greedy())
        rounds = rounds_over(b, prompts, 4)
        for _ in range(2):
            results = run_round(rounds)
            assert [r.reason for r in results] == [Reason.FAILED, Reason.LENGTH, Reason.FAILED, Reason.FAILED]
            assert str(results[0].error) == "no such role"
            assert isinstance(results[2].error, InputError)
            assert isinstance(results[3].error, InputError)
            assert [r.has_failed for r in results] == [True, False, True, True]
        assert results[1].stats.evaluated_tokens == 1
        del rounds


def test_tokens_that_are_none_fail_their_prompt_at_the_look_up() -> None:
    with bench() as b:
        prompts = prompts_of(2)
        prompts[0] = RoundPrompt([1 << 40], greedy())
        results = run_round(rounds_over(b, prompts, 1))
        assert isinstance(results[0].error, InputError)
        assert results[1].reason is Reason.LENGTH


def test_a_failure_of_the_executor_ends_what_was_in_it_and_the_next_round_is_whole() -> None:  # R56
    with bench() as b:
        prompts = prompts_of(3)
        rounds = rounds_over(b, prompts, 3)
        b.executor.fail_forward(RuntimeError("broken"))
        results = run_round(rounds)
        assert {r.reason for r in results} <= {Reason.FAILED, Reason.LENGTH}
        assert results[0].reason is Reason.FAILED
        assert "broken" in str(results[0].error)
        check_texts(b, prompts, run_round(rounds))
        del rounds


def test_a_runner_that_stops_ends_the_round() -> None:  # R54
    with bench() as b:
        rounds = rounds_over(b, prompts_of(3), max_running=2)
        with b.executor.holding_forward() as gate:
            seen: list[RoundResult] = []
            thread = threading.Thread(target=lambda: seen.extend(rounds.run_round()))
            thread.start()
            gate.wait_held()
            assert b.runner.shutdown(WAIT_S)
            thread.join(WAIT_S)
        assert not thread.is_alive()
        by_index = {result.index: result for result in seen}
        assert len(by_index) == 3
        assert all(result.has_failed for result in seen)
        assert {by_index[0].reason, by_index[1].reason} == {Reason.SHUTDOWN}


# ---- cancelling


def test_cancelling_ends_what_runs_keeps_its_text_and_begins_nothing_more() -> None:  # R59
    with bench(capacity=1 << 16) as b:
        prompts = [RoundPrompt(prompt.tokens, greedy()) for prompt in prompts_of(4)]
        rounds = rounds_over(b, prompts, 4, max_running=2)
        seen: list[RoundResult] = []
        thread = threading.Thread(target=lambda: seen.extend(rounds.run_round()))
        thread.start()
        eventually(lambda: b.runner.stats()["decode_tokens"] >= 100, "nothing was decoded")
        rounds.cancel()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        results = sorted(seen, key=lambda result: result.index)
        assert [result.reason for result in results] == [Reason.CANCELLED] * 4
        assert all(result.stats.generated_tokens and result.text for result in results[:2])
        assert all(result.queued_s is None and not result.text for result in results[2:])
        assert not any(result.has_failed for result in results)
        assert run_round(rounds) == [], "a round was begun after the cancelling"
        assert len(rounds.cache) == 0
        b.drain()
        assert b.runner.stats()["sessions"] == 0


def test_leaving_a_round_cancels_the_rest() -> None:
    with bench(capacity=1 << 16) as b:
        prompts = prompts_of(3)
        prompts[1:] = [RoundPrompt(prompt.tokens, greedy()) for prompt in prompts[1:]]
        rounds = rounds_over(b, prompts, 3)
        with closing(rounds.run_round()) as results:
            assert next(results).index == 0
        eventually(lambda: b.runner.stats()["running"] == 0, "it goes on")
        b.drain()
        assert b.runner.stats()["sessions"] == 0
        assert b.runner.stats()["cancelled"] == 2


# ---- sampling


def test_each_prompt_samples_by_itself() -> None:
    """The same seed gives the same text, whatever runs beside it and in whatever round."""
    config = GenConfig(max_tokens=8, sampler=SamplerConfig(temperature=2.0, seed=5))
    other = GenConfig(max_tokens=8, sampler=SamplerConfig(temperature=2.0, seed=6))
    with bench(options_for(4, 4)) as b:
        prompts = [RoundPrompt(PROMPT, config), RoundPrompt([1, 2], greedy(max_tokens=3))]
        rounds = rounds_over(b, [*prompts, RoundPrompt(PROMPT, config), RoundPrompt(PROMPT, other)], 4)
        first, second = run_round(rounds), run_round(rounds)
        assert first[0].text == first[2].text == second[0].text == second[2].text
        assert first[3].text == second[3].text != first[0].text
        del rounds


def test_times_count_from_the_beginning_of_the_round() -> None:
    with bench() as b:
        rounds = rounds_over(b, prompts_of(3), max_running=1)
        results = run_round(rounds)
        queued = [result.queued_s for result in results]
        assert queued == sorted(queued)  # type: ignore[type-var]
        for before, after in pairwise(results):
            assert after.queued_s is not None
            assert after.queued_s >= before.total_s
        for result in results:
            assert result.queued_s is not None
            assert result.stats.first_token_s is not None
            assert result.queued_s + result.stats.first_token_s <= result.total_s


def test_an_executor_error_is_no_lack_of_room() -> None:
    with bench() as b:
        b.executor.fail_forward(ExecutorError("odd"))
        (result,) = run_round(rounds_over(b, prompts_of(1)))
        assert (result.reason, result.n_restarts) == (Reason.FAILED, 0)
