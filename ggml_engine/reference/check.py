"""The check of an engine: one model, run in several ways, against libllama and against the definition.

Every way feeds the same random tokens (teacher-forced: what the model would say is never fed back, so that a rounding
difference stays one), and says what the logits of the main sequence were. What they are compared with, and how much
they may differ, is in `_compare`. Each bound has its reason beside it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import HyperparameterError, OptionError, UnsupportedArchitectureError
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.model import Model, load_model
from ggml_engine.pool.kv_types import kv_type as find_kv_type
from ggml_engine.reference.libllama import Libllama
from ggml_engine.reference.naive import NaiveModel
from ggml_engine.reference.ways import WAYS, ChunkedWay, Run, SharedWay, Tokens, chunked_ways

MIN_TOKENS = 16
DETERMINISTIC = "deterministic"

# The same kernels over the same shapes and places: nothing may differ.
EXACT = 0.0

# Ordinary mode, steps of other shapes: kernels work on several rows at once and on what is left over by other code, and
# quantised kernels round activations by rows of four, so that a row's last bits depend on how many are beside it; each
# layer then carries that on. Measured with the models of the demo extra, on two kinds of processor: up to 1.8e-2. A
# cell that is seen and must not be, or the reverse, gives 0.1 and more; deterministic mode is held to no difference.
OTHER_SHAPES = 5e-2

# Against float64. What rounds is, first of all, how K and V are stored (flash attention rounds queries and weights to
# f16 as well, and ggml looks GELU up in a table over f16, which the definition does too, but from other last bits):
# relative steps of 2^-24 for f32, 2^-11 for f16, 2^-8 for bf16, about 2^-8 and 2^-4 of a block's largest for q8_0 and
# q4_0. A squared error is the step squared, times what layers make of it. Measured on random models of 2 and 7 layers:
# 3e-9, 3e-6, 4e-5, 4e-4 and 5e-2; the bounds leave room for deeper ones. Without the mask it is 0.5 and more.
NAIVE_BOUNDS = {"f32": 1e-6, "f16": 1e-4, "bf16": 1e-3, "q8_0": 5e-3, "q4_0": 0.25}
# Kernels of quantised and of f16 and bf16 weights round activations too, to 8 bits or to that type.
NAIVE_BOUNDS_OF_WEIGHTS = {TensorType.F32: 0.0, TensorType.F16: 1e-3}
NAIVE_BOUND_OF_OTHER_WEIGHTS = 5e-2

MAX_NAIVE_WORK = 1 << 33  # parameters times tokens: a few seconds
MAX_NAIVE_SCORES = 1 << 27  # heads times tokens squared: a GiB of float64

_MAX_LOGITS = 1 << 24  # compared per way: 64 MiB of f32

Progress = Callable[[int, int], object]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One comparison: logits of `way` in `mode` with those of `against`.

    `difference` is the largest one between two logits. `error` is the mean squared difference over the variance of the
    reference's logits; `bound` is what it may come to, 0 for equal numbers. All three are None where nothing was
    compared, and `note` says why; such a row is ok.
    """

    mode: str
    way: str
    against: str
    difference: float | None
    error: float | None
    bound: float | None
    ok: bool
    note: str = ""


def check_model(
    path: str | os.PathLike[str],
    *,
    n_tokens: int = 96,
    seed: int = 0,
    threads: int | None = None,
    attention: Literal["both", "matmul", "flash"] = "both",
    kv_type: str = "f16",
    progress: Progress | None = None,
) -> list[CheckRow]:
    """Run the model at `path`, on the CPU, in every way and mode: the comparisons, failed ones among them.

    Modes are the forms of attention, and deterministic mode (which takes the matmul form). `progress(done, total)`
    counts runs. Raises GGUFError, ModelError and OptionError; the latter also when nothing can run with these options.
    """
    if attention not in ("both", "matmul", "flash"):
        raise OptionError(f"attention is both, matmul or flash, asked for {attention!r}")
    with GGUFFile.open(path) as file:
        model = load_model(file, device="cpu", threads=threads)
        try:
            check = _Check(model, n_tokens, seed, model.threads.decode, kv_type, progress)
            return check.rows(("matmul", "flash", DETERMINISTIC) if attention == "both" else _modes(attention))
        finally:
            model.free()


def _modes(attention: str) -> tuple[str, ...]:
    return ("flash",) if attention == "flash" else ("matmul", DETERMINISTIC)


class _Check:
    """A loaded model with the tokens that it is fed."""

    def __init__(
        self, model: Model, n_tokens: int, seed: int, n_threads: int, kv_type: str, progress: Progress | None
    ) -> None:
        limit = model.hp.n_ctx_train
        if not MIN_TOKENS <= n_tokens <= limit:
            raise OptionError(
                f"a check takes {MIN_TOKENS} tokens to the model's context of {limit}, asked for {n_tokens}"
            )
        self._model = model
        self._n_threads = n_threads
        self._kv_type = kv_type
        self._progress = progress or (lambda _done, _total: None)
        self._tokens = Tokens.random(model.file, n_tokens, seed, max(1, _MAX_LOGITS // model.hp.n_vocab))
        self._windows = sorted({window for window in model.hp.window if window})
        self._n_done = 0
        self._n_runs = 0

    def rows(self, modes: Sequence[str]) -> list[CheckRow]:
        rows = []
        options: dict[str, ExecutorOptions] = {}
        for mode in modes:
            try:
                options[mode] = self._options(mode)
            except OptionError as error:
                rows.append(_not_run(mode, "all", "all", str(error)))
        if not options:
            raise OptionError("nothing can run: " + "; ".join(row.note for row in rows))
        chunked = chunked_ways(self._tokens.n, self._windows)
        n_of_libllama = sum(1 if mode == DETERMINISTIC else len(chunked) for mode in options)
        self._n_runs = len(options) * (len(chunked) + len(WAYS)) + n_of_libllama
        rows += self._window_notes()
        expected, why_not = self._naive_logits()
        if expected is None:
            rows.append(_not_run("all", "all", "naive attention", why_not))
        for mode, chosen in options.items():
            rows += self._mode_rows(mode, chosen, chunked, expected)
        return rows

    def _options(self, mode: str) -> ExecutorOptions:
        n_all = 3 * self._tokens.n  # the most that a way holds at once
        form: Any = {"deterministic": True} if mode == DETERMINISTIC else {"attention": mode}
        options = ExecutorOptions(
            capacity=n_all + 4 * 64,  # a run more for every sequence
            max_batch_tokens=n_all,
            k_type=self._kv_type,
            v_type=self._kv_type,
            **form,
        )
        options.resolve("cpu")
        return options

    def _window_notes(self) -> list[CheckRow]:
        return [
            _not_run("all", f"window {window}", "all", f"{self._tokens.n} tokens do not pass it: ask for more tokens")
            for window in self._windows
            if window >= self._tokens.n
        ]

    def _naive_logits(self) -> tuple[npt.NDArray[np.float64] | None, str]:
        """The definition's logits, or None with the reason."""
        n, hp = self._tokens.n, self._model.hp
        n_parameters = sum(math.prod(info.shape) for info in self._model.file.tensors.values())
        if n_parameters * n > MAX_NAIVE_WORK or max(hp.n_head) * n * n > MAX_NAIVE_SCORES:
            return None, f"{n_parameters / 1e6:.0f} million parameters and {n} tokens are too large for naive attention"
        try:
            naive = NaiveModel(self._model.file.path)
        except (UnsupportedArchitectureError, HyperparameterError) as error:
            return None, str(error)
        return naive.logits(self._tokens.main)[self._tokens.wanted], ""

    def _naive_bound(self, mode: str) -> float:
        kv = NAIVE_BOUNDS[self._kv_type]
        if mode == "flash":
            kv = max(kv, NAIVE_BOUNDS["f16"])
        kinds = {info.type for info in self._model.file.tensors.values()}
        return max(kv, *(NAIVE_BOUNDS_OF_WEIGHTS.get(kind, NAIVE_BOUND_OF_OTHER_WEIGHTS) for kind in kinds))

    def _mode_rows(
        self,
        mode: str,
        options: ExecutorOptions,
        chunked: Sequence[ChunkedWay],
        expected: npt.NDArray[np.float64] | None,
    ) -> Iterator[CheckRow]:
        executor = GgmlExecutor(self._model, options)
        try:
            with self._libllama(options) as libllama:
                yield from self._compare(mode, executor, libllama, chunked, expected)
        finally:
            executor.close_all()

    def _libllama(self, options: ExecutorOptions) -> Libllama:
        """A context in the geometry of the options."""
        form, _ = options.resolve("cpu")
        n_ctx = -(-self._tokens.n // options.read_block) * options.read_block
        kind = int(find_kv_type(self._kv_type))
        return Libllama(
            self._model.file.path, n_ctx=n_ctx, flash=form.value == "flash", type_k=kind, type_v=kind,
            n_threads=self._n_threads, n_batch=n_ctx, n_ubatch=n_ctx, use_extra_bufts=True,
        )  # fmt: skip

    def _compare(
        self,
        mode: str,
        executor: GgmlExecutor,
        libllama: Libllama,
        chunked: Sequence[ChunkedWay],
        expected: npt.NDArray[np.float64] | None,
    ) -> Iterator[CheckRow]:
        is_deterministic = mode == DETERMINISTIC
        alone = theirs_alone = None
        ways: list[ChunkedWay | SharedWay] = [*chunked, *WAYS]
        for way in ways:
            found = self._run(way, executor)
            if alone is None or theirs_alone is None:  # the first way is one step of all tokens
                alone, theirs_alone = found, self._of_libllama(libllama, chunked[0])
            # Deterministic mode pads its steps: shapes that libllama does not have.
            theirs, same_steps = theirs_alone, False
            if isinstance(way, ChunkedWay) and not is_deterministic:
                same_steps = True
                theirs = theirs_alone if way is chunked[0] else self._of_libllama(libllama, way)
            yield _row(mode, way.name, "libllama", found, theirs, EXACT if same_steps else OTHER_SHAPES)
            if found is not alone and (is_deterministic or same_steps):  # else libllama's are as good: it was alone
                bound = EXACT if is_deterministic else OTHER_SHAPES
                yield _row(mode, way.name, chunked[0].name, found, alone, bound)
            if expected is not None:
                yield _row(mode, way.name, "naive attention", found, expected, self._naive_bound(mode))

    def _run(self, way: ChunkedWay | SharedWay, executor: GgmlExecutor) -> Logits:
        run = Run(executor, self._tokens)
        try:
            way.feed(run)
        finally:
            run.close()
        self._tick()
        return run.logits

    def _of_libllama(self, libllama: Libllama, way: ChunkedWay) -> Logits:
        """Its logits in the steps of `way`."""
        found, start = [], 0
        for size in way.sizes:
            stop = start + size
            wanted = self._tokens.is_wanted[start:stop]
            found.append(libllama.forward(self._tokens.main[start:stop], start, wants_logits=wanted))
            start = stop
        self._tick()
        return np.concatenate(found)

    def _tick(self) -> None:
        self._n_done += 1
        self._progress(self._n_done, self._n_runs)


def _not_run(mode: str, way: str, against: str, note: str) -> CheckRow:
    return CheckRow(mode, way, against, None, None, None, True, note)


def _row(
    mode: str, way: str, against: str, found: Logits, expected: npt.NDArray[np.floating[Any]], bound: float
) -> CheckRow:
    difference, error = compare_logits(found, expected)
    # not a number is past every bound
    ok = difference == 0.0 if bound == EXACT else error <= bound
    return CheckRow(mode, way, against, difference, error, bound, ok)


def compare_logits(found: Logits, expected: npt.NDArray[np.floating[Any]]) -> tuple[float, float]:
    """The largest difference, and the normalised mean squared error, of [n_tokens, n_vocab] each.

    The variance is that within a token's logits, mean over tokens. Both are infinite where a logit is not finite.
    """
    largest = squared = spread = 0.0
    for ours, theirs in zip(found, expected, strict=True):  # token by token: a vocabulary is large
        apart = ours.astype(np.float64) - theirs
        if not np.isfinite(apart).all():
            return math.inf, math.inf
        largest = max(largest, float(np.abs(apart).max()))
        squared += float(np.square(apart).mean())
        spread += float(np.var(theirs, dtype=np.float64))
    return largest, squared / spread if spread else (math.inf if squared else 0.0)
