"""`ExecutorOptions`: how a model is executed, and what of that can go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ggml_engine.errors import OptionError
from ggml_engine.models.attention import ATTENTION_OPTIONS, AttentionForm, AttentionOption
from ggml_engine.pool.kv_types import QUANTISED, KvFormat, VLayout, kv_type

# Rows that deterministic steps are a multiple of: kernels work on up to 8 rows at once, and on what is left over by
# other code, which rounds differently.
DETERMINISTIC_ROW_TILE = 8

# What runs and blocks of reads are a multiple of in deterministic mode: kernels add up in as many lanes as a vector has
# (64 is more than any here), so a shorter step in the number of rows, or in where a window begins, rounds differently.
DETERMINISTIC_GRAIN = 64

_NEEDS_ROWS: Final = ("cells", "flash", "flash_folded")


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """How a model is executed.

    `capacity` is in cells. `attention` "auto" takes what is fast on the device: on a CPU the compiled kernel ("cells")
    where there is one, else the matmul form over V in columns, elsewhere flash attention over V in rows; the folded
    forms read K and V once for all query heads that share them. `max_graph_bytes` bounds the working memory kept beside
    the newest graph's. `deterministic` makes a sequence's logits independent of what runs beside it, of how its tokens
    were cut into steps, and of where its cells lie: bit for bit, at some cost in speed (docs/determinism.md). `compact`
    moves the cells that a sequence does not share together, once reading it in pieces has cost as much as that.
    `candidates` says where the best logits of a row are found: inside the "graph", by this process in memory of the
    "host", or ("auto") in the graph where the rows lie on a device. `calibrate` lets attention "auto" choose by times
    that were measured on this machine, and measures them while there is nothing else to do (docs/performance.md).
    """

    capacity: int = 4096
    max_batch_tokens: int = 512
    attention: AttentionOption = "auto"
    v_layout: Literal["auto", "rows", "columns"] = "auto"
    k_type: str = "f16"
    v_type: str = "f16"
    cache_kind: str = "batched_cell"
    deterministic: bool = False
    max_graphs: int = 16
    max_graph_bytes: int = 256 << 20
    run: int = 64
    read_block: int = 256
    compact: bool = True
    candidates: Literal["auto", "graph", "host"] = "auto"
    calibrate: bool = False

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION_OPTIONS:
            raise OptionError(f"attention is one of {', '.join(ATTENTION_OPTIONS)}, asked for {self.attention!r}")
        if self.v_layout not in ("auto", "rows", "columns"):
            raise OptionError(f"v_layout is auto, rows or columns, asked for {self.v_layout!r}")
        if self.candidates not in ("auto", "graph", "host"):
            raise OptionError(f"candidates is auto, graph or host, asked for {self.candidates!r}")
        if self.attention in _NEEDS_ROWS and self.v_layout == "columns":
            raise OptionError(f"attention {self.attention!r} reads V in rows: it cannot go with v_layout 'columns'")
        if self.deterministic and (self.attention not in ("auto", "matmul") or self.v_layout == "rows"):
            raise OptionError(
                "deterministic mode takes the matmul form over V in columns: leave attention and v_layout"
            )
        for name in ("capacity", "max_batch_tokens", "max_graphs", "max_graph_bytes", "run", "read_block"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} must be a positive integer, is {value!r}")
        for name in ("compact", "calibrate"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is True or False, is {getattr(self, name)!r}")
        if self.deterministic and (self.run % DETERMINISTIC_GRAIN or self.read_block % DETERMINISTIC_GRAIN):
            raise OptionError(
                f"deterministic mode needs run and read_block in multiples of {DETERMINISTIC_GRAIN}, "
                f"they are {self.run} and {self.read_block}"
            )

    def resolve(
        self, device_kind: str, *, usual_layout: VLayout = "columns", has_kernel: bool = False
    ) -> tuple[AttentionForm, KvFormat]:
        """The form and storage that the options stand for on a kind of device; `has_kernel`: "cells" can be had.

        `usual_layout` is what V is laid out in on a CPU where both can be; "auto" gives the usual form over it: "cells"
        over rows, or else the plain ones. Raises OptionError for what cannot go together.
        """
        wanted = usual_layout if self.v_layout == "auto" else self.v_layout
        k_type, v_type = kv_type(self.k_type), kv_type(self.v_type)
        if self.deterministic:
            form = AttentionForm.MATMUL
        elif self.attention == "auto" and has_kernel and wanted == "rows":
            form = AttentionForm.CELLS
        elif self.attention == "auto":
            needs_rows = wanted == "rows" or v_type in QUANTISED or device_kind != "cpu"
            form = AttentionForm.MATMUL if self.v_layout == "columns" or not needs_rows else AttentionForm.FLASH
        else:
            form = AttentionForm(self.attention)
        layout = self.v_layout
        if layout == "auto":
            layout = "columns" if form.is_matmul else "rows"
        kv_format = KvFormat(k_type, v_type, layout)
        if form.is_matmul:
            kv_format.check_matmul()
        return form, kv_format
