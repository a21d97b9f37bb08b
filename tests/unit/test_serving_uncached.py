"""Requests that want nothing of what is cached: `cache_prompt=False`."""

from __future__ import annotations

from typing import Any

import pytest
from control_bench import PROMPT
from fake_executor import WAIT_S
from serving_bench import serving

from ggml_engine.errors import OptionError
from ggml_engine.serving.request import ServingRequest


def test_a_request_that_wants_nothing_cached_reads_no_snapshot() -> None:
    with serving(prefix_cache_entries=8) as s:
        s.ask()
        lookups = s.runtime.cache.stats()["lookups"]
        n_clones = s.n_clones
        assert s.reused(cache_prompt=False) == 0
        assert s.runtime.cache.stats()["lookups"] == lookups
        assert s.n_clones == n_clones
        assert s.reused() == len(PROMPT) - 1, "others read on"


def test_its_prompt_is_captured_as_any_other() -> None:
    with serving(prefix_cache_entries=8) as s:
        assert s.reused(cache_prompt=False) == 0
        assert s.keys == [PROMPT]
        assert s.reused() == len(PROMPT) - 1


def test_a_named_session_is_begun_anew_and_keeps_its_name() -> None:
    with serving(prefix_cache_entries=8) as s:
        history = s.turn("a", PROMPT)
        assert s.reused([*history, 5], session="a", cache_prompt=False) == 0
        (info,) = s.runtime.sessions()
        assert (info.name, info.position) == ("a", len(history) + 1 + 3)
        s.check_at_rest()
        again = [*history, 5]
        assert s.reused([*again, *s.b.expected(again, 4), 6], session="a") == len(again) + 3


def test_its_choices_share_what_it_has_evaluated_itself() -> None:
    with serving(prefix_cache_entries=8) as s:
        s.ask()
        reply = s.ask(n=3, cache_prompt=False)
        assert (reply.stats.cached_tokens, reply.stats.evaluated_tokens) == (0, len(PROMPT) + 2)


def test_a_cancel_while_its_session_is_opened_leaves_nothing() -> None:
    with serving(prefix_cache_entries=8) as s:
        s.turn("a", PROMPT)
        s.b.executor.open_gate.close()
        reply = s.submit(PROMPT, session="a", cache_prompt=False)
        s.b.executor.open_gate.wait_held()
        reply.cancel()
        s.b.executor.open_gate.release()
        assert reply.wait(WAIT_S)
        s.check_at_rest()
        assert s.runtime.sessions()[0].position == len(PROMPT) + 3, "what there was is kept"


@pytest.mark.parametrize("given", [None, 0, 1, "no"])
def test_what_is_no_truth_value_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="cache_prompt is true or false"):
        ServingRequest([1], cache_prompt=given)
