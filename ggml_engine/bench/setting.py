"""`Setting`: one model on this machine, with the options of the run: what the cases make their drivers from.

Weights are loaded when first needed, once for each engine, and can be released in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ggml_engine.bench.driver import Driver, Room, TokenIds
from ggml_engine.bench.ours import OurDriver, capacity_for
from ggml_engine.control.machine_memory import machine_memory
from ggml_engine.errors import OptionError
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.ggml.threads import default_threads
from ggml_engine.models.kv_estimate import estimate_bytes_per_cell
from ggml_engine.models.model import Model, load_model
from ggml_engine.models.prefill_weights import PrefillLayout, check_layout

if TYPE_CHECKING:
    from ggml_engine.bench.llama_cpp import LlamaCppModel, Mode
    from ggml_engine.engine import Engine

_MEMORY_SHARE = 0.8  # of what is free that K/V of one row may take, all engines together


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: tokens, sequences and steps. Raises OptionError for what cannot be."""

    prompts: tuple[int, ...] = (128, 512, 2048)
    histories: tuple[int, ...] = (0, 512, 2048, 4096)
    widths: tuple[int, ...] = (2, 4, 8, 16, 32)
    width_history: int = 256
    shared_widths: tuple[int, ...] = (8, 16)
    shared_prefix: int = 2048
    shared_own: int = 16
    parked: int = 8192
    parked_history: int = 512
    clone_prefix: int = 4096
    warm_prompt: int = 2048
    stream_prompt: int = 6000
    steps: int = 32
    python_widths: tuple[int, ...] = (1, 16)

    def steps_of(self, width: int) -> int:
        """Decode steps of a repetition: fewer where a step has many sequences, 8 at the least."""
        return min(self.steps, max(8, 4 * self.steps // width))


QUICK = Sizes(
    prompts=(16, 64), histories=(0, 32), widths=(2, 4), width_history=16, shared_widths=(2,), shared_prefix=64,
    shared_own=4, parked=128, parked_history=32, clone_prefix=64, warm_prompt=48, stream_prompt=96, steps=4,
    python_widths=(1, 2),
)  # fmt: skip


@dataclass(slots=True)
class Setting:
    """`threads` None is the cores of this process, for both engines. `capacity` 0 is what a row needs."""

    path: Path
    sizes: Sizes = field(default_factory=Sizes)
    repetitions: int = 5
    against_llama_cpp: bool = False
    threads: int | None = None
    device: str = "auto"
    attention: Literal["auto", "flash", "matmul"] = "auto"
    capacity: int = 0
    seed: int = 0
    prefill_weights: PrefillLayout = "off"
    progress: Callable[[str], object] = lambda _text: None
    _file: GGUFFile | None = None
    _model: Model | None = None
    _llama_cpp: LlamaCppModel | None = None

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise OptionError(f"repetitions must be at least 1, asked for {self.repetitions}")
        self.options()  # refused before anything is loaded
        check_layout(self.prefill_weights)

    # ---- what is loaded

    @property
    def n_threads(self) -> int:
        """Threads that compute, the same for all."""
        return self.threads or default_threads()

    def options(self) -> ExecutorOptions:
        """How ours executes; its capacity is the least."""
        return ExecutorOptions(capacity=self.capacity or 1, attention=self.attention)

    @property
    def file(self) -> GGUFFile:
        """The open file."""
        if self._file is None:
            self._file = GGUFFile.open(self.path)
        return self._file

    @property
    def model(self) -> Model:
        """Our weights. Raises as `load_model`."""
        if self._model is None:
            self.progress("loading the weights")
            self._model = load_model(
                self.file, device=self.device, threads=self.n_threads, prefill_weights=self.prefill_weights
            )
        return self._model

    @property
    def llama_cpp(self) -> LlamaCppModel:
        """Those of libllama. Raises ModelError."""
        from ggml_engine.bench.llama_cpp import LlamaCppModel  # noqa: PLC0415  # only where it is compared with

        if self._llama_cpp is None:
            self.progress("loading the weights in llama.cpp")
            on_device = self.model.layer_backends[-1].device.kind != "cpu"
            self._llama_cpp = LlamaCppModel(self.path, n_threads=self.n_threads, on_device=on_device)
        return self._llama_cpp

    def release(self) -> None:
        """Free what was loaded; idempotent. What is needed later is loaded again."""
        if self._llama_cpp is not None:
            self._llama_cpp.close()
        if self._model is not None:
            self._model.free()
        if self._file is not None:
            self._file.close()
        self._llama_cpp = self._model = self._file = None

    def load_engine(self, ctx: int) -> Engine:
        """An `Engine` with that capacity, at the options of the run. Raises as `Engine.load`."""
        from ggml_engine.engine import Engine  # noqa: PLC0415

        return Engine.load(
            self.path, engine="native", ctx=max(ctx, self.capacity), threads=self.n_threads, device=self.device,
            attention=self.attention, prefill_weights=self.prefill_weights,
        )  # fmt: skip

    # ---- what the cases ask for

    @property
    def n_ctx(self) -> int:
        """The model's context: positions that a sequence may have."""
        hp = self.model.hp
        return min(hp.n_ctx_train, hp.max_positions or hp.n_ctx_train)

    def tokens(self, n: int, seed: int = 0) -> TokenIds:
        """Random ids, i32 [n], the same for each engine and in each run."""
        rng = np.random.default_rng((self.seed, seed))
        return rng.integers(0, self.model.hp.n_vocab, n, dtype=np.int32)

    def too_long(self, n_positions: int) -> str:
        """Why a sequence cannot have that many positions; empty where it can."""
        n_ctx = self.n_ctx
        return "" if n_positions <= n_ctx else f"needs {n_positions} positions, the model's context has {n_ctx}"

    def too_large(self, n_cells: int) -> str:
        """Why that many cells more cannot be had; empty where they can, or where it cannot be told."""
        memory = machine_memory()
        n_bytes = n_cells * estimate_bytes_per_cell(self.file, TensorType.F16, TensorType.F16)
        if memory is None or n_bytes <= _MEMORY_SHARE * memory.available:
            return ""
        return f"needs {n_bytes >> 20} MiB of K/V, {memory.available >> 20} MiB of memory are free"

    @contextmanager
    def drivers(self, room: Room, skipped: dict[str, str]) -> Iterator[list[Driver]]:
        """Ours, and llama.cpp's in the modes that the room can have; none where ours does not fit.

        What is left out is noted in `skipped`, with the reason.
        """
        made: list[Driver] = []
        try:
            if reason := self.too_long(room.n_positions) or self.too_large(capacity_for(room)):
                skipped["ours"] = reason
            else:
                self.progress("making contexts")
                made.append(OurDriver(self.model, self.options(), room))
                made += self._of_llama_cpp(room, skipped)
            yield made
        finally:
            for driver in made:
                driver.close()

    def _of_llama_cpp(self, room: Room, skipped: dict[str, str]) -> list[Driver]:
        made: list[Driver] = []
        if not self.against_llama_cpp:
            return made
        from ggml_engine.bench.llama_cpp import MODES, LlamaCppDriver, n_cells_of  # noqa: PLC0415

        n_cells = capacity_for(room)
        for mode in sorted(MODES, key=lambda mode: n_cells_of(mode, room)):
            if room.n_sequences == 1 and mode.unified:
                skipped[mode.name] = "a single sequence: split and unified are the same"
            elif reason := self.too_large(n_cells + n_cells_of(mode, room)):
                skipped[mode.name] = reason
            else:
                n_cells += n_cells_of(mode, room)
                made.append(LlamaCppDriver(self.llama_cpp, mode, room))
        order = [mode.name for mode in MODES]
        return sorted(made, key=lambda driver: order.index(driver.name))

    def defaults(self) -> Mode | None:
        """Llama.cpp's mode where nobody chooses one; None where it takes no part."""
        return self.llama_cpp.defaults() if self.against_llama_cpp else None

    def plain(self) -> dict[str, Any]:
        """The options for JSON."""
        from dataclasses import asdict  # noqa: PLC0415

        return {
            "repetitions": self.repetitions,
            "against": "llama.cpp" if self.against_llama_cpp else None,
            "threads": self.n_threads,
            "device": self.device,
            "attention": self.attention,
            "prefill_weights": self.prefill_weights,
            "capacity": self.capacity or None,
            "seed": self.seed,
            "sizes": asdict(self.sizes),
        }


def fitting(sizes: Sequence[int], limit: int) -> list[int]:
    """Those that are not past a limit, ascending and once each."""
    return sorted({size for size in sizes if size <= limit})
