"""Sessions and prefix caches of real models in a new process: what is evaluated is counted, and every bit is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import saved_child
from real_models import gemma3_270m, smollm2
from saved_child import CONFIG, OPTIONS, WAIT_S, goings_on, prompt_of

from ggml_engine import Engine, GenConfig, PrefixCache, SavedStateError


@pytest.mark.parametrize(("model", "length"), [(smollm2, 1280), (gemma3_270m, 600)], ids=["smollm2", "gemma3"])
def test_a_new_process_evaluates_what_is_new(model: Callable[[], Path], length: int, tmp_path: Path) -> None:
    prompt = prompt_of(length)
    with Engine.load(model(), **OPTIONS) as engine:
        cache = PrefixCache(8)
        with engine.session() as session:
            capture = cache.capture_prompt(session, prompt)
            generation = session.generate_async(prompt, CONFIG, capture.wrap(), on_settled=capture.at_end())
            assert generation.wait(WAIT_S)
            assert capture.collect({"user": 7}, WAIT_S)
            session.save(tmp_path, "talk", WAIT_S)
            assert cache.save(tmp_path, timeout=WAIT_S) == 2
            n_cells = engine.executor.cache.used_cells
            assert n_cells == length + CONFIG.max_tokens - 1
            cell = engine.executor.bytes_per_cell
            for path in tmp_path.iterdir():  # the prompt is in both entries, and in the file once
                assert n_cells * cell < path.stat().st_size < n_cells * (cell + 16) + 4096
            want = goings_on(engine, cache, session, prompt)
    child = [sys.executable, str(saved_child.__file__), str(model()), str(tmp_path), str(length)]
    done = subprocess.run(child, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["loaded"] == 2
    assert result["cells"] == 2 * n_cells  # once for the cache, once for the session
    found = result["found"]
    assert found["again"]["evaluated"] == 1
    assert found["longer"]["evaluated"] == 5
    assert found["changed"]["evaluated"] == 7
    assert found["on"]["evaluated"] == 3 + 1
    assert found == want


def test_a_file_of_another_model_or_execution_is_refused_by_name(tmp_path: Path) -> None:
    with Engine.load(smollm2(), ctx=256, threads=1) as engine, engine.session() as session:
        session.generate([1, 5, 9], GenConfig(max_tokens=1), timeout=WAIT_S)
        session.save(tmp_path, "talk", WAIT_S)
        with engine.runner().load_session(tmp_path, "talk", WAIT_S) as same:
            assert same.tokens == [1, 5, 9]
    for path, options, known in (
        (smollm2(), {"kv_type": "q8_0"}, "k_type 'f16' and not 'q8_0'"),
        (gemma3_270m(), {}, "architecture 'llama' and not 'gemma3'"),
    ):
        with Engine.load(path, ctx=256, threads=1, **options) as engine:
            with pytest.raises(SavedStateError, match=known) as caught:
                engine.runner().load_session(tmp_path, "talk", WAIT_S)
            assert caught.value.code == "other-model"
            assert engine.executor.cache.used_cells == 0
