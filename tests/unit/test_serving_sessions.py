"""Named sessions of a serving runtime. `R` numbers: rules of the contract."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_bench import PROMPT
from fake_executor import WAIT_S
from serving_bench import Serving, serving, wait_for

from ggml_engine.control.generation import Reason
from ggml_engine.control.options import RunnerOptions
from ggml_engine.errors import (
    InputError,
    PositionError,
    SavedStateError,
    SessionBusyError,
    SessionError,
    SessionLimitError,
    UnknownSessionError,
)
from ggml_engine.serving.names import SessionNames


def names(s: Serving, partition: str = "") -> list[str]:
    return [info.name for info in s.runtime.sessions(partition)]


def test_a_session_goes_on_where_it_was() -> None:
    with serving() as s:
        history = s.turn("a", PROMPT)
        for n_new in (1, 3, 2):
            before = len(history)
            history = [*history, *range(30, 30 + n_new)]
            reply = s.ask(history, session="a")
            assert reply.stats.evaluated_tokens == 1 + n_new, "the pending token, and what is new"
            assert reply.stats.cached_tokens == before - 1
            history = [*history, *reply.choices[0].tokens]
        assert len(s.b.executor.calls_of("open")) == 1


def test_a_history_that_leaves_the_reply_out_goes_on_from_a_clone_of_what_is_shared() -> None:  # R85
    with serving() as s:
        s.turn("a", PROMPT)
        branch = [*PROMPT, 70, 71]
        assert s.reused(branch, session="a") == len(PROMPT)
        assert [call.arguments[1] for call in s.b.executor.calls_of("clone")] == [len(PROMPT)]
        assert s.runtime.sessions()[0].position == len(branch) + 3
        assert s.n_open == 1, "the session that was replaced is open"


def test_a_branch_without_a_lane_is_evaluated_anew() -> None:  # R85
    with serving(prefix_capture_slots=1) as s:
        s.turn("a", PROMPT)
        lane = s.runtime._lanes.take()
        assert lane is not None
        assert s.reused([*PROMPT, 70, 71], session="a") == 0
        lane.release()
        assert s.n_clones == 0
        assert s.reused([*PROMPT, 70, 72], session="a") == len(PROMPT) + 1


def test_a_branch_without_a_lane_still_finds_the_cache() -> None:  # R85 R86
    with serving(prefix_cache_entries=4, prefix_capture_slots=1) as s:
        s.turn("a", PROMPT)
        lane = s.runtime._lanes.take()
        assert lane is not None
        assert s.reused([*PROMPT, 70, 71], session="a") == len(PROMPT)
        lane.release()


@pytest.mark.parametrize("fault", [RuntimeError("no"), 1])
def test_a_branch_whose_clone_is_refused_is_evaluated_anew(fault: BaseException | int) -> None:  # R85 R81
    with serving() as s:
        s.turn("a", PROMPT)
        s.b.executor.fail_clone(fault)
        assert s.reused([*PROMPT, 70, 71], session="a") == 0


def test_the_same_prompt_once_more_forwards_its_last_token() -> None:
    with serving() as s:
        s.turn("a", PROMPT)
        assert s.reused(PROMPT, session="a") == len(PROMPT) - 1


def test_another_prompt_under_the_same_name_begins_anew() -> None:
    with serving() as s:
        s.turn("a", PROMPT)
        assert s.reused([90, 91, 92], session="a") == 0
        assert s.n_open == 1


def test_what_another_session_made_is_taken_where_it_is_more() -> None:
    with serving(prefix_cache_entries=4, prefix_checkpoint_prompt_end="every") as s:
        history = s.turn("a", PROMPT)
        longer = [*s.turn("b", [*history, 20, 21]), 22]
        assert s.reused(longer, session="a") == len(history) + 2, "the prompt of b's last turn"


def test_a_refused_look_up_leaves_the_session_to_go_on() -> None:
    with serving(prefix_cache_entries=4, prefix_checkpoint_prompt_end="every") as s:
        history = s.turn("a", PROMPT)
        longer = s.turn("b", [*history, 20, 21])
        s.b.executor.fail_clone(RuntimeError("no"))
        assert s.reused(longer, session="a") == len(history) - 1


def test_a_session_in_use_is_refused_at_once() -> None:
    with serving() as s:
        with s.b.executor.holding_forward() as gate:
            reply = s.submit(session="a")
            gate.wait_held()
            with pytest.raises(SessionBusyError, match="'a' is in use"):
                s.submit(session="a")
            with pytest.raises(SessionBusyError):
                s.runtime.rewind("", "a", 1, WAIT_S)
            assert s.runtime.sessions()[0].is_busy
        assert reply.result(WAIT_S)
        s.ask(session="a")


@pytest.mark.parametrize("error", [InputError])
def test_a_request_that_is_refused_takes_no_name(error: type[Exception]) -> None:
    with serving() as s:
        with pytest.raises(error):
            s.submit([], session="a")
        assert not names(s)


def test_an_idle_session_is_closed_when_its_time_has_come() -> None:
    with serving(session_idle_s=60.0, prefix_cache_entries=4, prefix_checkpoint_prompt_end="every") as s:
        history = s.turn("a", PROMPT)
        s.clock.now += 59
        assert s.runtime.expire() == 0
        prompt = [*history, 7]
        history = s.turn("a", prompt)
        s.clock.now += 59
        assert s.runtime.expire() == 0
        s.clock.now += 1
        assert s.runtime.expire() == 1
        assert not names(s)
        assert s.runtime.stats()["expired"] == 1
        assert s.reused([*history, 8], session="a") == len(prompt), "its snapshots are gone, too"


def test_a_busy_session_is_not_too_old() -> None:
    with serving(session_idle_s=60.0) as s:
        with s.b.executor.holding_forward() as gate:
            reply = s.submit(session="a")
            gate.wait_held()
            s.clock.now += 1000
            assert s.runtime.expire() == 0
        assert reply.result(WAIT_S)
        assert s.runtime.expire() == 0


def test_the_runtime_sees_to_old_sessions_by_itself() -> None:
    with serving(session_idle_s=0.05) as s:
        s.turn("a", PROMPT)  # tells the control thread when to look again
        s.clock.now += 1
        wait_for(lambda: not names(s), "the session is still there")
        s.drain()
        assert s.n_open == 0


def test_names_go_by_shares_of_partitions() -> None:
    """One partition's many names push out its own, and none of who has fewer."""
    names = SessionNames(4)

    def use(partition: str, name: str, now: float) -> None:
        held = names.claim((partition, name), now)
        held.is_busy, held.last_used = False, now

    def there() -> list[str]:
        return ["/".join(each.key) for each in names]

    use("a", "0", 0.0)
    for i in range(1, 7):
        use("b", str(i), float(i))
    assert there() == ["a/0", "b/4", "b/5", "b/6"], "b's own oldest went"
    use("a", "7", 7.0)
    assert there() == ["a/0", "b/5", "b/6", "a/7"]
    use("c", "8", 8.0)
    assert there() == ["b/5", "b/6", "a/7", "c/8"], "of two that have most, the oldest"
    for each in names:
        each.is_busy = each.key[0] == "b"
    with pytest.raises(SessionLimitError):
        use("b", "9", 9.0)
    assert there() == ["b/5", "b/6", "a/7", "c/8"]


def test_the_session_that_was_used_longest_ago_makes_place() -> None:
    with serving(max_sessions=2) as s:
        for name in "aba":
            s.clock.now += 1
            history = s.turn(name, PROMPT)
        s.turn("c", [40, 41])
        assert names(s) == ["a", "c"]
        with s.b.executor.holding_forward() as gate:
            replies = [s.submit([*history, 1], session="a")]
            gate.wait_held()
            replies.append(s.submit([40, 41, 42], session="c"))
            with pytest.raises(SessionLimitError, match="all of the 2 sessions"):
                s.submit(session="d")
        for reply in replies:
            assert reply.result(WAIT_S)


def test_closing_ends_the_request_and_the_name_is_free_at_once() -> None:
    with serving() as s:
        with s.b.executor.holding_forward() as gate:
            reply = s.submit(session="a", n_tokens=50)
            gate.wait_held()
            s.runtime.close_session("", "a")
            assert not names(s)
            again = s.submit(session="a")
        assert reply.wait(WAIT_S)
        assert reply.choices[0].reason is Reason.CANCELLED
        assert again.result(WAIT_S)
        s.drain()
        assert names(s) == ["a"]
        s.runtime.close_session("", "a")
        with pytest.raises(UnknownSessionError, match="no session 'a'"):
            s.runtime.close_session("", "a")
        s.drain()
        assert s.n_open == 0


def test_a_fork_shares_cells_and_goes_on_by_itself() -> None:
    with serving() as s:
        history = s.turn("a", PROMPT)
        n_used = s.b.executor.cache.used_cells
        assert s.runtime.fork("", "a", "b", timeout=WAIT_S).position == len(history) - 1
        assert s.runtime.fork("", "a", "c", 4, WAIT_S).position == 4
        assert s.b.executor.cache.used_cells == n_used
        assert names(s) == ["a", "b", "c"]
        assert s.reused([*PROMPT[:4], 80, 81], session="c") == 4
        assert s.reused([*history, 80], session="b") == len(history) - 1
        assert s.reused([*history, 81], session="a") == len(history) - 1


def test_a_session_can_be_forked_while_it_generates() -> None:
    with serving() as s:
        with s.b.executor.holding_forward(after=1) as gate:
            reply = s.submit(session="a", n_tokens=8)
            gate.wait_held()
            gate.release()
            assert s.runtime.fork("", "a", "b", 5, WAIT_S).position == 5
        assert reply.result(WAIT_S)


def test_forks_that_cannot_be_leave_no_name() -> None:
    with serving() as s:
        s.turn("a", PROMPT)
        with pytest.raises(UnknownSessionError):
            s.runtime.fork("", "nobody", "b", timeout=WAIT_S)
        for at in (0, -1, 99, True):
            with pytest.raises(PositionError, match="at position 12"):
                s.runtime.fork("", "a", "b", at, WAIT_S)
        s.turn("c", [40, 41])
        with pytest.raises(SessionBusyError, match="there is a session 'c' already"):
            s.runtime.fork("", "a", "c", timeout=WAIT_S)
        with pytest.raises(InputError):
            s.runtime.fork("", "a", "", timeout=WAIT_S)
        s.b.executor.fail_clone(RuntimeError("no"))
        with pytest.raises(SessionError, match="no clone of the session 'a'"):
            s.runtime.fork("", "a", "b", timeout=WAIT_S)
        assert names(s) == ["a", "c"]


def test_a_rewound_session_goes_on_from_there() -> None:
    with serving() as s:
        s.turn("a", PROMPT)
        assert s.runtime.rewind("", "a", 3, WAIT_S).position == 3
        for to in (0, -1, 4, True):
            with pytest.raises(PositionError):
                s.runtime.rewind("", "a", to, WAIT_S)
        with pytest.raises(UnknownSessionError):
            s.runtime.rewind("", "b", 1, WAIT_S)
        assert s.reused([*PROMPT[:3], 80, 81], session="a") == 3


def test_a_saved_session_is_loaded_under_any_name(tmp_path: Path) -> None:
    with serving() as s:
        history = s.turn("a", PROMPT)
        s.runtime.save("", "a", tmp_path, "file-of-a", WAIT_S)
        with pytest.raises(SavedStateError):
            s.runtime.save("", "a", tmp_path, "../file", WAIT_S)
        with pytest.raises(UnknownSessionError):
            s.runtime.save("", "b", tmp_path, "b", WAIT_S)
    with serving() as s:
        s.turn("b", [40, 41])
        assert s.runtime.load("", "b", tmp_path, "file-of-a", WAIT_S).position == len(history) - 1
        with pytest.raises(SavedStateError):
            s.runtime.load("", "c", tmp_path, "nothing", WAIT_S)
        assert names(s) == ["b"]
        with pytest.raises(SavedStateError):
            s.runtime.load("", "b", tmp_path, "nothing", WAIT_S)
        assert s.reused([*history, 80], session="b") == len(history) - 1


def test_a_poisoned_session_is_forgotten() -> None:
    with serving() as s:
        s.turn("a", PROMPT)
        s.b.executor.fail_forward(RuntimeError("broken"))
        reply = s.submit([*PROMPT, 1], session="a")
        assert reply.wait(WAIT_S)
        assert reply.choices[0].reason is Reason.FAILED
        s.drain()
        assert not names(s)
        s.turn("a", PROMPT)


# ---- when cells run out


def test_idle_sessions_give_their_cells_before_a_request_fails() -> None:
    with serving(capacity=52, max_batch_tokens=16) as s:
        histories = {name: s.turn(name, [i, *PROMPT]) for i, name in enumerate("abc", 1)}
        assert s.n_open == 3
        big = [(7 * i) % 97 for i in range(30)]
        s.ask(big)
        assert names(s) == ["c"], "those that were used longest ago went, and no more of them than needed"
        with pytest.raises(UnknownSessionError):
            s.runtime.rewind("", "a", 1, WAIT_S)
        with pytest.raises(UnknownSessionError):
            s.runtime.fork("", "a", "x", timeout=WAIT_S)
        assert s.reused([*histories["a"], 5], session="a") == 0
        assert names(s) == ["a", "c"]


def test_a_session_that_generates_gives_nothing() -> None:
    with serving(capacity=40, max_batch_tokens=16) as s:
        history = s.turn("a", PROMPT)
        with s.b.executor.holding_forward(after=1) as gate:
            busy = s.submit([*history, 1, 2], 4, session="a")
            gate.wait_held()
            big = s.submit([(7 * i) % 97 for i in range(30)], 2)
        assert busy.result(WAIT_S)[0].tokens == s.b.expected([*history, 1, 2], 4)
        assert big.result(WAIT_S)


def test_a_request_whose_session_was_just_lost_begins_anew() -> None:
    with serving(capacity=64, runner_options=RunnerOptions(), max_batch_tokens=16) as s:
        history = s.turn("a", PROMPT)
        (named,) = s.runtime._names
        session = named.session
        assert session is not None
        # the engine gives its cells away between the control thread's look at it and the beginning
        generate_from = session.generate_from

        def lose(*args: object, **options: object) -> object:
            del session.generate_from  # type: ignore[union-attr]
            s.b.runner._core.scheduler._evict(session._state)  # type: ignore[union-attr]
            return generate_from(*args, **options)  # type: ignore[arg-type]

        session.generate_from = lose  # type: ignore[method-assign, assignment]
        assert s.reused([*history, 1], session="a") == 0
        assert names(s) == ["a"]


def test_rows_that_are_kept_are_the_sessions_own_and_its_partitions_snapshots() -> None:
    with serving(prefix_cache_entries=8, prefix_checkpoint_prompt_end="every") as s:
        history = s.turn("a", PROMPT)
        prompt = [*history, 20]
        whole = s.turn("a", prompt)
        s.turn("a", [90, 91, 92], partition="other")
        s.turn("c", [93, 94])

        def rows(partition: str, name: str) -> list[list[int]]:
            return [list(map(int, row)) for row in s.runtime.retained_tokens(partition, name)]

        assert rows("", "a") == [whole, [93, 94], prompt], "the token that was sampled last is part of the session"
        assert rows("", "nobody") == [[93, 94], prompt]
        assert rows("other", "nobody") == [[90, 91, 92]]
        s.runtime.close_session("", "a")
        assert rows("", "a") == [[93, 94], prompt]
        assert rows("third", "a") == []
