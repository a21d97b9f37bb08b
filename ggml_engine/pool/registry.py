"""Kinds of caches: how an executor is given one, and how someone adds a third.

A kind is a name and a builder. `batched_cell` (also `batched`) is the cell cache: many sequences in one pool.
`sequence` is one contiguous sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy.typing as npt

from ggml_engine.errors import OptionError
from ggml_engine.ggml.backends import Backend
from ggml_engine.ggml.library import Libraries
from ggml_engine.models.config import KvLayer
from ggml_engine.pool.cell_cache import GgmlCellCache, GgmlSequenceCache
from ggml_engine.pool.cells import BatchControl
from ggml_engine.pool.compaction import Move
from ggml_engine.pool.kv_pool import GgmlKvPool
from ggml_engine.pool.kv_types import KvFormat
from ggml_engine.pool.read_plan import ReadKind
from ggml_engine.pool.step import Step


class GgmlCache(BatchControl, Protocol):
    """What an executor needs of a cache: batch control, planning, and where the K and V lie."""

    @property
    def pool(self) -> GgmlKvPool:
        """The storage."""

    @property
    def window_of_layer(self) -> tuple[int, ...]:
        """For each layer the index of its window in a placement's reads."""

    @property
    def open_sequences(self) -> tuple[int, ...]:
        """The ids of all open sequences."""

    @property
    def run(self) -> int:
        """How many cells are taken together."""

    def count_cells(self, sequences: Iterable[int]) -> int:
        """How many distinct cells these sequences own."""

    def declare(self, sequences: npt.ArrayLike) -> Step:
        """Admit a step; see `CellCache.declare`."""

    def free(self) -> None:
        """Free the storage; idempotent."""


@runtime_checkable
class MovesCells(Protocol):
    """What a cache has besides, in which the cells of a sequence can be moved together."""

    def plan_move(self, sequence: int) -> Move | None:
        """A move worth its cells, or None; see `CellCache.plan_move`."""

    def move(self, move: Move, backends: Sequence[Backend]) -> int:
        """Make it, and return the bytes copied; see `GgmlCellCache.move`."""


@runtime_checkable
class ClonesAnywhere(Protocol):
    """What a cache has besides that says so where its sequences can be cloned at each of their positions."""

    clones_anywhere: bool


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a cache is built from. `capacity` is in cells; `backends` has one for each layer."""

    libraries: Libraries
    layers: Sequence[KvLayer]
    backends: Sequence[Backend]
    capacity: int
    kv_format: KvFormat
    run: int = 64
    read_block: int = 256
    reads: ReadKind = ReadKind.IN_BLOCKS


CacheBuilder = Callable[[CacheConfig], GgmlCache]


def _build_cells(config: CacheConfig) -> GgmlCache:
    return GgmlCellCache(
        config.libraries,
        config.layers,
        config.backends,
        config.capacity,
        kv_format=config.kv_format,
        run=config.run,
        read_block=config.read_block,
        reads=config.reads,
    )


def _build_sequence(config: CacheConfig) -> GgmlCache:
    return GgmlSequenceCache(
        config.libraries,
        config.layers,
        config.backends,
        config.capacity,
        kv_format=config.kv_format,
        read_block=config.read_block,
    )


_BUILDERS: dict[str, CacheBuilder] = {
    "batched_cell": _build_cells,
    "batched": _build_cells,
    "sequence": _build_sequence,
}


def cache_kinds() -> tuple[str, ...]:
    """The known kinds."""
    return tuple(_BUILDERS)


def register_cache(kind: str, builder: CacheBuilder) -> None:
    """Add a kind. Raises OptionError when the name is taken."""
    if kind in _BUILDERS:
        raise OptionError(f"there is a cache kind {kind!r} already")
    _BUILDERS[kind] = builder


def build_cache(kind: str, config: CacheConfig) -> GgmlCache:
    """A cache of that kind. Raises OptionError listing the known ones."""
    if kind not in _BUILDERS:
        raise OptionError(f"there is no cache kind {kind!r}; there are: {', '.join(_BUILDERS)}")
    return _BUILDERS[kind](config)
