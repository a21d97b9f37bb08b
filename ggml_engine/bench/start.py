"""Whole processes: from their start to a first token, and the most memory that they took.

Ours, and with `--against llama.cpp` the same through llama-cpp-python's `Llama`, at equal cells; in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Final

from ggml_engine.bench.measure import turns
from ggml_engine.bench.report import Comparison, ModelReport, Series
from ggml_engine.bench.setting import Setting
from ggml_engine.errors import EngineError

PROMPT: Final = "The capital of France is"
N_CELLS: Final = 512
_TIMEOUT_S: Final = 600.0
_LAST_LINES: Final = 3  # of what a child that failed said

OURS: Final = """
began = time.perf_counter()
from ggml_engine import Engine, GenConfig, SamplerConfig
engine = Engine.load(
    path, ctx=cells, threads=threads, device=device, attention=attention, prefill_weights=prefill_weights,
    engine="native",
)
loaded = time.perf_counter()
config = GenConfig(max_tokens=1, sampler=SamplerConfig(temperature=0.0), ignore_eos=True)
assert any(update.tokens for update in engine.generate(prompt, config).updates())
"""
THEIRS: Final = """
began = time.perf_counter()
from llama_cpp import Llama
model = Llama(path, n_ctx=cells, n_threads=threads, n_threads_batch=threads, verbose=False)
loaded = time.perf_counter()
assert any(True for _ in model(prompt, max_tokens=1, temperature=0.0, stream=True))
"""
_BEFORE: Final = """
import json, os, sys, time
path, cells, threads, device, attention, prefill_weights, prompt = json.loads(sys.argv[1])
"""
_AFTER: Final = """
try:
    with open("/proc/self/status") as status:  # Linux's ru_maxrss counts what the process was before it was this one
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024
except (OSError, StopIteration):
    try:
        import resource
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    except ImportError:
        peak = None
print(json.dumps([loaded - began, peak]), flush=True)
os._exit(0)
"""


def start(setting: Setting, report: ModelReport) -> None:
    """Load and first token in processes of their own."""
    row = report.row("start", f"{N_CELLS} cells, a prompt of 5 words")
    setting.release()
    programs = {"ours": OURS, **({"llama-cpp-python": THEIRS} if setting.against_llama_cpp else {})}
    first = {name: row.add(f"{name}, start to first token", "s") for name in programs}
    load = {name: row.add(f"{name}, load", "s") for name in programs}
    peak = {name: row.add(f"{name}, peak memory", "bytes") for name in programs}
    if len(programs) > 1:
        theirs = "llama-cpp-python"
        row.comparisons.append(Comparison("time, ours / llama-cpp-python", first["ours"], first[theirs]))
        row.comparisons.append(Comparison("memory, ours / llama-cpp-python", peak["ours"], peak[theirs]))
    names = list(programs)
    with tempfile.TemporaryDirectory() as directory:
        environment = child_environment(directory)
        for repetition in range(-1, setting.repetitions):
            setting.progress(f"{row.case}, {row.label}: {max(0, repetition)} of {setting.repetitions} repetitions")
            found = {}
            for which in turns(len(names), max(0, repetition)):
                found[names[which]] = _run(setting, programs[names[which]], environment)
            if repetition >= 0:
                for name, (total_s, load_s, n_bytes) in found.items():
                    first[name].values.append(total_s)
                    load[name].values.append(load_s)
                    _note(peak[name], n_bytes)
    if not peak["ours"].values:
        row.skipped["peak memory"] = "this system does not tell it"


def child_environment(directory: str) -> dict[str, str]:
    """What the processes inherit; where Python is told to keep no bytecode, they keep theirs in `directory`.

    Else every one of them would compile all its modules, which no installed program does. The first repetition, which
    does not count, writes it.
    """
    environment = dict(os.environ)
    if environment.pop("PYTHONDONTWRITEBYTECODE", None):
        environment["PYTHONPYCACHEPREFIX"] = directory
    return environment


def _note(series: Series, value: float | None) -> None:
    if value is not None:
        series.values.append(value)


def _run(setting: Setting, program: str, environment: dict[str, str]) -> tuple[float, float, float | None]:
    arguments = [
        str(setting.path.resolve()), N_CELLS, setting.n_threads, setting.device, setting.attention,
        setting.prefill_weights, PROMPT,
    ]  # fmt: skip
    command = [sys.executable, "-c", _BEFORE + program + _AFTER, json.dumps(arguments)]
    began = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    total_s = time.perf_counter() - began
    if done.returncode:
        said = " ".join(done.stderr.split("\n")[-1 - _LAST_LINES :]).strip()
        raise EngineError(f"a process that was started to be measured ended with {done.returncode}: {said}")
    load_s, n_bytes = json.loads(done.stdout.splitlines()[-1])
    return total_s, load_s, n_bytes
