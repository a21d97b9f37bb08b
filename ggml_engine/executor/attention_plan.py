"""`AttentionPlan`: which form of attention an executor's steps take, and the measuring that a later one will know of.

Decided at construction: from times that were measured on this machine before, else by the usual table. What is
measured later is kept for the next executor: steps of one shape have one form as long as this one lives, so that its
texts do not change their rounding halfway.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ggml_engine.errors import EngineError, OptionError
from ggml_engine.executor import measured_times
from ggml_engine.executor.attention_choice import AttentionTable, Times, table_of, usual_table
from ggml_engine.executor.calibration import AttentionShape, Calibration, Subject
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.executor.planned_rows import PlannedReading
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.attention import AttentionForm
from ggml_engine.models.model import Model
from ggml_engine.pool.kv_types import KvFormat, kv_type
from ggml_engine.pool.read_plan import ReadKind

log = logging.getLogger("ggml_engine.executor")

_TILED_TYPES = frozenset({TensorType.F16, TensorType.F32})


class AttentionPlan:
    """Forms, reads and storage of an executor. Raises OptionError for options that cannot go together.

    `forms` are those that steps may have: one, or in "auto" with measured times several. `reading` is how steps are cut
    for the compiled kernel, None where no step is computed by it.
    """

    def __init__(self, model: Model, options: ExecutorOptions) -> None:
        kind = model.layer_backends[-1].device.kind
        is_on_cpu = all(backend.device.kind == "cpu" for backend in model.layer_backends)
        most_threads = max(model.threads.decode, model.threads.prefill)
        reading = PlannedReading.of(model.hp, model.hp.kv_layers(), most_threads) if is_on_cpu else None
        if reading is None and options.attention == "cells":
            raise OptionError(
                "attention 'cells' needs the compiled kernel, a processor and heads that it takes, and all layers on "
                "the CPU"
            )
        is_measured = options.attention == "auto" and not options.deterministic and is_on_cpu
        k_type, v_type = kv_type(options.k_type), kv_type(options.v_type)
        self.subject: Subject | None = None
        self.table: AttentionTable | None = None
        self._pending: Calibration | None = None
        self._wants_times = False
        if is_measured:
            backend, shape = model.backends[-1], AttentionShape.of(model.hp)
            self.subject = Subject(
                model.libraries,
                backend,
                model.threads,
                shape,
                len(model.hp.kv_owners()),
                KvFormat(k_type, v_type),
                reading,
            )
            is_tiled = k_type == v_type and k_type in _TILED_TYPES
            self.table = usual_table(shape.n_group, is_tiled=is_tiled, has_kernel=reading is not None)
            if options.calibrate and not measured_times.is_switched_off():
                known = measured_times.load(self.subject.name)
                if known is not None:
                    self.table = table_of(known, self.table)
                self._wants_times = known is None
        layout = "columns" if self.table is None else self.table.v_layout
        self.form, self.kv_format = options.resolve(kind, usual_layout=layout, has_kernel=reading is not None)
        self.forms = frozenset({self.form})
        if self.table is not None:
            self.forms = self.table.all_forms(self.kv_format.v_layout)
        self._only = next(iter(self.forms)) if len(self.forms) == 1 else None
        self.reading = reading if AttentionForm.CELLS in self.forms else None
        self._is_deterministic = options.deterministic

    @property
    def has_masks(self) -> bool:
        """Whether some step's reads are whole blocks under a mask."""
        return self.forms != {AttentionForm.CELLS}

    @property
    def read_kind(self) -> ReadKind:
        """How reads are planned: one way for all steps."""
        if self._is_deterministic:
            return ReadKind.BY_POSITION
        return ReadKind.IN_BLOCKS if self.has_masks else ReadKind.EXACT

    @property
    def joins(self) -> bool:
        """`KvRows.join` of the steps that read with masks."""
        return self._is_deterministic or any(form.is_flash for form in self.forms)

    def form_of(self, n_tokens: int, rows_read: Sequence[int]) -> AttentionForm:
        """The form of a step of `n_tokens` that reads so many rows through each window."""
        if self._only is not None or self.table is None:
            return self._only or self.form
        return self.table.form(self.kv_format.v_layout, n_tokens, max(rows_read, default=1))

    # ---- measuring

    def want_times(self) -> None:
        """Let `measure_some` measure what is not known yet, whatever the options say."""
        if self.subject is not None and not measured_times.is_switched_off():
            self._wants_times = self._pending is not None or measured_times.load(self.subject.name) is None

    def measure_some(self) -> bool:
        """A slice of what is to be measured, 50 ms at most; whether there is more to do.

        What fails is not tried again. The times are kept in the user's cache directory when all are there.
        """
        if not self._wants_times or self.subject is None:
            return False
        return self._measure_slice(self.subject)

    def measure_all(self) -> Times | None:
        """All of it anew, whatever is known: seconds a layer by form, tokens and rows.

        None where nothing can be chosen. Raises NativeError where memory or a computation fails, ExecutorError where
        something else computes meanwhile.
        """
        if self.subject is None:
            return None
        self.free()
        calibration = Calibration(self.subject)
        try:
            while calibration.step():
                pass
        finally:
            calibration.free()
        self._keep(self.subject, calibration)
        return calibration.times

    def _measure_slice(self, subject: Subject) -> bool:
        if self._pending is None:
            self._pending = Calibration(subject)
        try:
            if self._pending.step():
                return True
        except (EngineError, MemoryError) as error:
            log.info("attention could not be measured: %s", error)
        else:
            self._keep(subject, self._pending)
        self.free()
        return False

    def _keep(self, subject: Subject, calibration: Calibration) -> None:
        if calibration.times is not None and not measured_times.is_switched_off():
            measured_times.save(subject.name, calibration.times)

    def free(self) -> None:
        """Give up what is being measured; idempotent."""
        self._wants_times = False
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.free()
