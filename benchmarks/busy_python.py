"""What a busy Python thread costs a stream: the time of a token with and without it.

    python benchmarks/busy_python.py [--model NAME_OR_PATH] [--tokens 64] [--turns 5]

The busy thread computes in Python without a pause, as an application's own code may. It shares Python's lock with the
engine's thread, which needs it between forwards, never inside one. Run it with fewer threads than cores
(`--threads`), or the processor is what they share.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading

from ggml_engine import Engine, GenConfig, SamplerConfig


def busy(stop: threading.Event) -> None:
    n = 0
    while not stop.is_set():
        n = (n * 1103515245 + 12345) % 2147483648


def token_times(engine: Engine, prompt: list[int], config: GenConfig) -> list[float]:
    with engine.session() as session:
        times = session.generate(prompt, config).stats.token_times_s
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description="A stream beside a busy Python thread.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    config = GenConfig(max_tokens=arguments.tokens, sampler=SamplerConfig(temperature=0.0), ignore_eos=True)
    with Engine.load(arguments.model, ctx=1024, threads=arguments.threads) as engine:
        prompt = engine.vocabulary.encode("Once upon a time", add_special=True, parse_special=False).tolist()
        token_times(engine, prompt, config)
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(arguments.turns):
            alone += token_times(engine, prompt, config)
            stop = threading.Event()
            thread = threading.Thread(target=busy, args=(stop,), daemon=True)
            thread.start()
            beside += token_times(engine, prompt, config)
            stop.set()
            thread.join()
        print(f"switch interval {sys.getswitchinterval() * 1e3:.1f} ms")
        for name, times in (("alone", alone), ("beside a busy thread", beside)):
            print(
                f"{name:22} median {statistics.median(times) * 1e3:8.2f} ms a token, worst {max(times) * 1e3:8.2f} ms"
            )
        print(f"ratio of medians {statistics.median(beside) / statistics.median(alone):.3f}")


if __name__ == "__main__":
    main()
