"""A forward of a real model is told to stop from another thread, and the executor works on as if it had never run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engines import executor_over, feed, loaded
from real_models import smollm2

from ggml_engine.errors import AbortedError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml import library

N_PREFILL = 512


def forward_and_abort(executor: GgmlExecutor, batch: Batch) -> None:
    """`abort` comes when ggml says that it runs a graph, or is about to: that is set around the native call alone."""
    ended = threading.Event()

    def abort_while_running() -> bool:
        while not ended.is_set():
            if library._running:
                executor.abort()
                return True
        return False

    with ThreadPoolExecutor(1) as pool:
        aborted = pool.submit(abort_while_running)
        try:
            executor.forward(batch)
        finally:
            ended.set()
            assert aborted.result(timeout=60), "the forward was over before it was seen"


def test_a_prefill_is_aborted_from_another_thread() -> None:  # R69 R107
    found = []
    with loaded(smollm2(), threads=2) as model:
        tokens = np.random.default_rng(6).integers(5, model.hp.n_vocab - 5, N_PREFILL + 40).tolist()
        for aborts in (False, True):
            with executor_over(model, capacity=1024) as executor:
                a, b = executor.open(), executor.open()
                feed(executor, b, tokens[:20])
                batch = Batch.of_sequence(a, tokens[:N_PREFILL])
                if aborts:
                    used = executor.cache.used_cells
                    with pytest.raises(AbortedError):
                        forward_and_abort(executor, batch)
                    assert executor.length(a) == 0
                    assert executor.cache.used_cells == used + N_PREFILL
                    executor.rewind(a, 0)
                    assert executor.cache.used_cells == used
                    executor.clear_abort()
                logits = [executor.forward(batch), feed(executor, a, tokens[N_PREFILL:], 1), feed(executor, b, [9], 1)]
                found.append(np.concatenate(logits).tobytes())
    assert found[0] == found[1]
