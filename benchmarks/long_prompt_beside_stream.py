"""A stream, and a long prompt that is read beside it: the longest gap, and what the prompt's reading loses.

    python benchmarks/long_prompt_beside_stream.py [--model NAME_OR_PATH] [--prompt 6000] [--turns 3]

In each turn: the prompt alone, the stream alone, then the prompt beside the stream, with a short third request in the
middle; all at default settings. Run it alone: threads of ggml spin.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

from ggml_engine import Engine, GenConfig, SamplerConfig, Update

TEXT = "The quick brown fox jumps over the lazy dog, and nobody at the river minds. "
GREEDY = SamplerConfig(temperature=0.0)


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def stream_config(n: int) -> GenConfig:
    return GenConfig(max_tokens=n, sampler=GREEDY, ignore_eos=True)


def turn(engine: Engine, prompt: list[int], begin: list[int]) -> dict[str, float]:
    alone = engine.session().generate(prompt, GenConfig(max_tokens=1, sampler=GREEDY))
    alone_s = alone.stats.prefill_s
    with engine.session() as session:
        solo = gaps(session.generate(begin, stream_config(64)).stats.token_times_s)
    times: list[float] = []

    def note(update: Update) -> None:
        if update.tokens:
            times.append(time.perf_counter())

    session, other, third = engine.session(), engine.session(), engine.session()
    stream = session.generate_async(begin, stream_config(8000), note)
    while len(times) < 16:
        time.sleep(0.01)
    n_before = len(times)
    long = other.generate_async(prompt, GenConfig(max_tokens=1, sampler=GREEDY))
    short_s = 0.0
    for update in long.updates():
        if not short_s and update.prefill is not None and update.prefill.done > len(prompt) // 2:
            short = third.generate(begin, GenConfig(max_tokens=1, sampler=GREEDY))
            short_s = short.stats.queued_s + (short.stats.first_token_s or 0.0)
    n_after = len(times)
    stream.cancel()
    stream.wait(60)
    beside = gaps(times[n_before - 1 : n_after])
    for each in (session, other, third):
        each.close()
    return {
        "solo step": statistics.median(solo),
        "longest gap": max(beside),
        "median gap": statistics.median(beside),
        "prefill share": alone_s / long.stats.prefill_s,
        "prefill tokens/s alone": len(prompt) / alone_s,
        "first token of a short request": short_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A long prompt beside a stream.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=6000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    with Engine.load(arguments.model, ctx=3 * arguments.prompt, threads=arguments.threads) as engine:
        text = TEXT * (arguments.prompt // 10)
        prompt = engine.vocabulary.encode(text, add_special=True, parse_special=False).tolist()[: arguments.prompt]
        begin = engine.vocabulary.encode("Once upon a time", add_special=True, parse_special=False).tolist()
        engine.session().generate(begin, stream_config(16))  # warm
        rows = [turn(engine, prompt, begin) for _ in range(arguments.turns)]
        for row in rows:
            print(
                f"solo step {row['solo step'] * 1e3:7.1f} ms | longest gap {row['longest gap'] * 1e3:7.1f} ms = "
                f"{row['longest gap'] / row['solo step']:5.1f} steps, median {row['median gap'] * 1e3:6.1f} ms | "
                f"prefill {row['prefill tokens/s alone']:6.1f} tokens/s alone, {row['prefill share']:5.3f} of it "
                f"beside | short request's first token {row['first token of a short request'] * 1e3:7.1f} ms"
            )


if __name__ == "__main__":
    main()
