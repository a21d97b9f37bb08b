"""What a user of sessions sees: the first token of a prompt that was read before, and a stream beside a long prompt.

Through the engine, its thread and its prefix cache, at default settings; greedy, over random ids.
"""

from __future__ import annotations

import itertools
import statistics
import time

from ggml_engine.bench.report import Comparison, ModelReport
from ggml_engine.bench.setting import Setting
from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Update
from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.engine import Engine
from ggml_engine.errors import EngineError
from ggml_engine.ggml.sampler_config import SamplerConfig

_GREEDY = SamplerConfig(temperature=0.0)
_FIRST_TOKEN = GenConfig(max_tokens=1, sampler=_GREEDY, ignore_eos=True)
_SOLO_STEPS = 32
_BEFORE = 8  # tokens of the stream before the long prompt comes


def warm(setting: Setting, report: ModelReport) -> None:
    """Time to the first token of a prompt that the prefix cache holds, and of the same prompt cold."""
    n = setting.sizes.warm_prompt
    row = report.row("warm", f"first token of {n}")
    if reason := setting.too_long(n + 1):
        row.skipped["ours"] = reason
        return
    prompt = setting.tokens(n).tolist()
    setting.release()  # the engine has weights of its own
    with setting.load_engine(3 * n + 512) as engine:
        cache = PrefixCache(1)
        with engine.session() as session:
            setting.progress("warm: reading the prompt")
            capture = cache.capture_prompt(session, prompt)
            session.generate_async(prompt, _FIRST_TOKEN, capture.wrap()).result()
            capture.collect()
        _warm_s(engine, cache, prompt)  # graphs are built
        cold_times, warm_times = row.add("cold", "s"), row.add("warm", "s")
        row.comparisons.append(Comparison("cold / warm", cold_times, warm_times))
        for repetition in range(setting.repetitions):
            setting.progress(f"{row.case}, {row.label}: {repetition} of {setting.repetitions} repetitions")
            first = _warm_s(engine, cache, prompt) if repetition % 2 else None
            cold = _cold_s(engine, prompt)
            cold_times.values.append(cold)
            warm_times.values.append(_warm_s(engine, cache, prompt) if first is None else first)


def _cold_s(engine: Engine, prompt: list[int]) -> float:
    began = time.perf_counter()
    with engine.session() as session:
        session.generate(prompt, _FIRST_TOKEN)
        return time.perf_counter() - began


def _warm_s(engine: Engine, cache: PrefixCache, prompt: list[int]) -> float:
    began = time.perf_counter()
    found = cache.lookup(engine.runner(), prompt)
    if found.session is None:
        raise EngineError(f"the prefix cache did not give back the prompt that it was given: {found.miss}")
    with found.session as session:
        session.generate(prompt[found.n_reused :], _FIRST_TOKEN)
        return time.perf_counter() - began


def stream(setting: Setting, report: ModelReport) -> None:
    """A stream beside which a long prompt is read: its longest gap, and the reading's speed against alone."""
    n = setting.sizes.stream_prompt
    row = report.row("stream", f"a prompt of {n} beside a stream")
    if reason := setting.too_long(n + 1):
        row.skipped["ours"] = reason
        return
    prompt, begin = setting.tokens(n).tolist(), setting.tokens(16, 1).tolist()
    most = setting.n_ctx - len(begin) - 1
    setting.release()
    with setting.load_engine(2 * n + most + 512) as engine:
        engine.generate(begin, GenConfig(max_tokens=8, sampler=_GREEDY, ignore_eos=True)).wait()  # warm
        solo, longest = row.add("step of the stream alone", "s"), row.add("longest gap", "s")
        median = row.add("median gap", "s")
        alone, beside = row.add("prefill alone", "s", n), row.add("prefill beside", "s", n)
        short = row.add("first token of a short request", "s")
        row.comparisons.append(Comparison("longest gap / step alone", longest, solo))
        row.comparisons.append(Comparison("prefill's speed beside / alone", alone, beside))
        for repetition in range(setting.repetitions):
            setting.progress(f"{row.case}, {row.label}: {repetition} of {setting.repetitions} repetitions")
            with engine.session() as session:
                alone_s = session.generate(prompt, _FIRST_TOKEN).stats.prefill_s
            with engine.session() as session:
                config = GenConfig(max_tokens=_SOLO_STEPS, sampler=_GREEDY, ignore_eos=True)
                solo_gaps = _gaps(session.generate(begin, config).stats.token_times_s)
            gaps, beside_s, short_s = _beside(engine, prompt, begin, most)
            solo.values.append(statistics.median(solo_gaps))
            longest.values.append(max(gaps))
            median.values.append(statistics.median(gaps))
            alone.values.append(alone_s)
            beside.values.append(beside_s)
            short.values.append(short_s)


def _beside(engine: Engine, prompt: list[int], begin: list[int], most: int) -> tuple[list[float], float, float]:
    """Gaps of a stream while `prompt` is read, the reading's time, and that of a short request in its middle."""
    times: list[float] = []
    short_s = 0.0

    def note(update: Update) -> None:
        if update.tokens:
            times.append(time.perf_counter())

    with engine.session() as session, engine.session() as other, engine.session() as third:
        config = GenConfig(max_tokens=most, sampler=_GREEDY, ignore_eos=True)
        running = session.generate_async(begin, config, note)
        for _ in running.updates():
            if len(times) >= _BEFORE:
                break
        n_before = len(times)
        reading = other.generate_async(prompt, _FIRST_TOKEN)
        for update in reading.updates():
            is_halfway = update.prefill is not None and update.prefill.done >= len(prompt) // 2
            if is_halfway and not short_s:
                stats = third.generate(begin, _FIRST_TOKEN).stats
                short_s = stats.queued_s + (stats.first_token_s or 0.0)
        reading.result()
        n_after = len(times)
        running.cancel()
        running.wait()
        gaps = _gaps(times[n_before - 1 : n_after + 1])
        if not gaps:
            raise EngineError("the stream ended before the prompt was read")
        return gaps, reading.stats.prefill_s, short_s


def _gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]
