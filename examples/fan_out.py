"""One trunk, four branches: an agent that tries four continuations of one long context at once.

    python examples/fan_out.py [--model smollm2] [--trunk-tokens 2000]

The trunk is read once. While it still decodes, four clones are taken: they share its cells, so each costs integers and
no K/V. Then all five generate side by side in the same forwards.
"""

from __future__ import annotations

import argparse
import time

from ggml_engine import Engine, GenConfig, SamplerConfig

BRANCHES = (
    "\nIn one sentence, the lesson of this is",
    "\nA title for this text:",
    "\nThe opposite view would be that",
    "\nA question about this text:",
)


def trunk_tokens(engine: Engine, n: int) -> list[int]:
    """A long text of exactly `n` tokens."""
    paragraph = (
        "A library lends what it keeps. Every reader sees the same shelves, and no book is copied because two people "
        "want to read it. When somebody writes a note of their own, it goes on a page of their own. "
    )
    tokens = engine.vocabulary.encode(paragraph * (n // 30 + 1), add_special=True, parse_special=False)
    return [int(token) for token in tokens[:n]]


def main() -> None:
    """Run it, and print what it cost."""
    parser = argparse.ArgumentParser(description="Four branches of one trunk, cloned while it decodes.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--trunk-tokens", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--deterministic", action="store_true", help="same tokens alone and in company")
    arguments = parser.parse_args()
    greedy = SamplerConfig(temperature=0.0)
    with Engine.load(
        arguments.model, ctx=arguments.trunk_tokens + 1024, deterministic=arguments.deterministic
    ) as engine:
        trunk = engine.session()
        prompt = trunk_tokens(engine, arguments.trunk_tokens)
        begun = time.perf_counter()
        story = trunk.generate_async(prompt, GenConfig(max_tokens=3 * arguments.max_tokens, sampler=greedy))
        next(story)  # the prompt was read, and the trunk decodes
        print(f"trunk: {len(prompt)} tokens read in {time.perf_counter() - begun:.2f} s")

        used = engine.executor.stats()["cells_used"]
        begun = time.perf_counter()
        futures = [trunk.clone_async(len(prompt)) for _ in BRANCHES]
        branches = [branch for future in futures if (branch := future.result(30)) is not None]
        taken_s = time.perf_counter() - begun
        # the trunk went on meanwhile, so what was added is its own
        added = engine.executor.stats()["cells_used"] - used
        print(f"{len(branches)} clones in {taken_s * 1e3:.1f} ms, {added} cells more, the trunk's own included")

        config = GenConfig(max_tokens=arguments.max_tokens, sampler=greedy)
        answers = [
            branch.generate_async(engine.vocabulary.encode(text, add_special=False, parse_special=False), config)
            for branch, text in zip(branches, BRANCHES, strict=True)
        ]
        for text, answer in zip(BRANCHES, answers, strict=True):
            print(f"{text.strip()!r}: {answer.result(300)!r}")
        print(f"trunk: {story.result(300)!r}")
        evaluated = story.stats.evaluated_tokens + sum(answer.stats.evaluated_tokens for answer in answers)
        print(f"evaluated {evaluated} prompt tokens in all; without sharing it had been {evaluated + 4 * len(prompt)}")


if __name__ == "__main__":
    main()
