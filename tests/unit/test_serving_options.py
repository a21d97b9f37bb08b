"""Options of a serving runtime: their defaults, and which of them are refused. `R` numbers: rules of the contract."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest
from control_bench import bench
from serving_bench import serving

from ggml_engine.control.options import RunnerOptions
from ggml_engine.errors import OptionError
from ggml_engine.serving.checkpoints import PromptCheckpoints, checkpoint_positions
from ggml_engine.serving.options import DEFAULT_SERVER_ENTRIES, ServingOptions
from ggml_engine.serving.runtime import ServingRuntime

DEFAULTS = {
    "prefix_cache_entries": 0,
    "prefix_checkpoint_prompt_end": "initial",
    "prefix_checkpoint_interval": None,
    "prefix_checkpoint_policy": None,
    "prefix_capture_slots": None,
    "max_sessions": 64,
    "max_requests": 32,
    "max_queue": 128,
    "max_session_tokens": None,
    "session_idle_s": 600.0,
}


def test_the_options_have_these_names_and_defaults() -> None:  # R90
    found = {field.name: field.default for field in dataclasses.fields(ServingOptions)}
    assert found == DEFAULTS
    assert ServingOptions.of({}) == ServingOptions() == ServingOptions.of(DEFAULTS)
    assert DEFAULT_SERVER_ENTRIES == 64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefix_cache_entries", 5),
        ("prefix_checkpoint_prompt_end", "every"),
        ("prefix_checkpoint_interval", 7),
        ("prefix_capture_slots", 3),
        ("max_sessions", 9),
        ("max_requests", 4),
        ("max_queue", 0),
        ("max_session_tokens", 99),
        ("session_idle_s", None),
    ],
)
def test_an_option_of_a_mapping_is_the_one_of_that_name(name: str, value: Any) -> None:  # R90
    given = {name: value, **({} if name == "prefix_cache_entries" else {"prefix_cache_entries": 8})}
    assert getattr(ServingOptions.of(given), name) == value


def test_a_name_that_is_no_option_is_refused_with_those_that_are() -> None:  # R90
    with pytest.raises(OptionError, match="no option prefix_cache_entires; there are: prefix_cache_entries, "):
        ServingOptions.of({"prefix_cache_entires": 5})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, -1) for name in ("prefix_cache_entries", "max_queue")),
        *((name, 0) for name in ("max_sessions", "max_requests", "prefix_capture_slots", "max_session_tokens")),
        ("prefix_checkpoint_interval", 0),
        *((name, True) for name in ("prefix_cache_entries", "max_requests", "prefix_checkpoint_interval")),
        *((name, "8") for name in ("prefix_cache_entries", "max_sessions", "max_session_tokens", "session_idle_s")),
        ("max_sessions", None),
        ("prefix_checkpoint_prompt_end", "all"),
        ("prefix_checkpoint_policy", 4),
        ("session_idle_s", 0),
        ("session_idle_s", float("nan")),
        ("session_idle_s", float("inf")),
        ("session_idle_s", True),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: Any) -> None:  # R93
    given = {name: value, **({} if name == "prefix_cache_entries" else {"prefix_cache_entries": 8})}
    with pytest.raises(OptionError, match=rf"^{name}.*{re.escape(repr(value))}"):
        ServingOptions(**given)


REFUSED = [
    ({"prefix_cache_entries": 8, "prefix_checkpoint_prompt_end": "every", "prefix_checkpoint_interval": 4}, 1),
    ({"prefix_checkpoint_prompt_end": "every"}, 0),
    ({"prefix_checkpoint_interval": 4}, 0),
    ({"prefix_checkpoint_policy": lambda *_: [1]}, 0),
]


@pytest.mark.parametrize(("given", "first"), REFUSED)
def test_a_combination_that_cannot_be_names_both_options(given: dict[str, Any], first: int) -> None:  # R76 R93
    names = [*given][first:]
    if "prefix_cache_entries" not in given:
        names.append("prefix_cache_entries")
    with pytest.raises(OptionError) as refused:
        ServingOptions(**given)
    assert all(name in str(refused.value) for name in names), refused.value
    # nothing else is wrong with it: each of them alone, with a cache, is taken
    for name in [*given]:
        ServingOptions(**{"prefix_cache_entries": 8, name: given[name]})


def test_a_runner_that_is_too_small_is_refused_before_anything_is_opened() -> None:  # R93
    options = ServingOptions(prefix_cache_entries=4, max_sessions=3, max_requests=2)
    assert options.resident_sessions == 3 + 2 + 4 + 2
    with bench(RunnerOptions(max_sessions=10)) as b:
        with pytest.raises(OptionError, match=r"max_sessions of the runner is 10, 11 .*prefix_cache_entries 4"):
            ServingRuntime(b.runner, options)
        assert not b.executor.calls
    with bench(RunnerOptions(max_sessions=11)) as b:
        assert ServingRuntime(b.runner, options).shutdown()


def test_the_flag_reserves_nothing_more() -> None:  # R77
    both = [ServingOptions(prefix_cache_entries=5, prefix_checkpoint_prompt_end=end) for end in ("initial", "every")]  # type: ignore[arg-type]
    assert len({(options.resident_sessions, options.capture_slots) for options in both}) == 1
    rows = []
    for options in both:
        fields = {name: getattr(options, name) for name in DEFAULTS}
        with serving(**fields) as s:
            s.ask()
            rows.append((s.b.executor.capacity, s.runtime.stats()["lanes"], s.runtime.cache.max_entries, s.n_open))
    assert rows[0] == rows[1]
    assert rows[0][2] == 5


@pytest.mark.parametrize(
    ("given", "slots"),
    [
        ({}, 32),
        ({"max_sessions": 4}, 4),
        ({"max_requests": 3}, 3),
        ({"prefix_checkpoint_prompt_end": "every"}, 32),
        ({"prefix_checkpoint_interval": 4}, 2),
        ({"prefix_checkpoint_policy": lambda *_: [1]}, 2),
        ({"prefix_checkpoint_interval": 4, "prefix_capture_slots": 5}, 5),
    ],
)
def test_lanes_are_as_many_as_may_begin_at_once(given: dict[str, Any], slots: int) -> None:
    assert ServingOptions(prefix_cache_entries=8, **given).capture_slots == slots


@pytest.mark.parametrize(
    ("given", "begins", "expected"),
    [
        ({}, True, {9}),
        ({}, False, set()),
        ({"prefix_checkpoint_prompt_end": "every"}, False, {9}),
        ({"prefix_checkpoint_interval": 4}, True, {4, 8, 9}),
        ({"prefix_checkpoint_interval": 4}, False, {4, 8}),
        ({"prefix_checkpoint_policy": lambda *_: [2, 9, 10, 0, -1]}, True, {2, 9}),
        ({"prefix_checkpoint_policy": lambda *_: []}, True, set()),
        ({"prefix_checkpoint_policy": lambda *_: [1 / 0]}, True, set()),
    ],
)
def test_where_a_prompt_is_captured(given: dict[str, Any], begins: bool, expected: set[int]) -> None:
    options = ServingOptions(prefix_cache_entries=8, **given)
    assert checkpoint_positions(options, 0, 0, [1] * 9, begins=begins) == expected
    assert checkpoint_positions(options, 4, 0, [1] * 9, begins=begins) == {n for n in expected if n > 4}


def test_a_policy_is_told_start_opening_and_prompt() -> None:
    told: list[Any] = []
    options = ServingOptions(
        prefix_cache_entries=8, prefix_checkpoint_policy=lambda *what: told.append(what) or [what[1]]
    )
    assert checkpoint_positions(options, 2, 5, [1, 2, 3, 4, 5, 6], begins=False) == {5}
    assert told == [(2, 5, [1, 2, 3, 4, 5, 6])]


def test_no_flag_turns_a_method_into_another_one() -> None:  # R91
    assert list(inspect.signature(PromptCheckpoints.discard).parameters) == ["self"]
