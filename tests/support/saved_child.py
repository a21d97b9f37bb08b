"""Sessions and prefix caches of real models, as one process leaves them and a new one goes on with them.

Run as a program with a model, a directory and the length of a prompt, it is the new process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from ggml_engine import Engine, GenConfig, PrefixCache, SamplerConfig, Session

WAIT_S = 600
CONFIG = GenConfig(max_tokens=3, sampler=SamplerConfig(temperature=0.0), ignore_eos=True, logprobs=3)
OPTIONS: dict[str, Any] = {"ctx": 4096, "deterministic": True, "threads": 2}


def outcome(session: Session, tokens: list[int]) -> dict[str, Any]:
    """What a generation evaluated, and what came out to the last bit of its probabilities."""
    generation = session.generate(tokens, CONFIG, timeout=WAIT_S)
    return {
        "evaluated": generation.stats.evaluated_tokens,
        "tokens": generation.tokens,
        "logprobs": [repr(each) for each in generation.logprobs],
    }


def goings_on(engine: Engine, cache: PrefixCache, session: Session, prompt: list[int]) -> dict[str, Any]:
    """The prompt again, the prompt and more, another end, and the session goes on."""
    found = {}
    for name, tokens in {
        "again": prompt,
        "longer": [*prompt, *prompt[:5]],
        "changed": [*prompt[:-7], *prompt[:7]],
    }.items():
        lookup = cache.lookup(engine.runner(), tokens, WAIT_S)
        with lookup.session or engine.session() as branch:
            found[name] = outcome(branch, tokens[lookup.n_reused :])
    found["on"] = outcome(session, prompt[3:6])
    return found


def main(model: str, directory: str, length: str) -> None:
    """The new process: load, go on, and print what came of it."""
    prompt = prompt_of(int(length))
    with Engine.load(model, **OPTIONS) as engine:
        cache = PrefixCache(8)
        n_loaded = cache.load(engine.runner(), directory, timeout=WAIT_S)
        session = engine.runner().load_session(directory, "talk", WAIT_S)
        n_cells = engine.executor.cache.used_cells
        found = goings_on(engine, cache, session, prompt)
        sys.stdout.write(json.dumps({"loaded": n_loaded, "cells": n_cells, "found": found}))


def prompt_of(length: int) -> list[int]:
    """Random tokens that every vocabulary here has."""
    found: list[int] = np.random.default_rng(5).integers(1000, 40_000, length).tolist()
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
