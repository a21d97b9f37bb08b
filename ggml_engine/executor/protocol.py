"""`Executor`: what the control plane asks of whatever computes.

Everything but `abort` is called from one thread, between or inside steps; `abort` may come from any. Tests have one
without a model; `GgmlExecutor` is the real one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import InputError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.image import ImageReader, ImageWriter, KvImage
from ggml_engine.executor.outputs import Outputs, WholeRows, check_needs
from ggml_engine.executor.prepared import PreparedInput
from ggml_engine.ggml.candidates import RowNeed
from ggml_engine.models.adapter_set import NO_ADAPTERS, AdapterSet


class Executor(ABC):
    """Sequences, and forwards over them. Sequence ids are never issued twice."""

    # ---- limits

    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many cells there are."""

    @property
    @abstractmethod
    def free_cells(self) -> int:
        """How many cells no sequence owns."""

    @property
    def max_positions(self) -> int:
        """The most positions of one sequence: all cells, or what the model has positions for."""
        return self.capacity

    @property
    def run(self) -> int:
        """How many cells are taken together: a position's cell is congruent to it modulo this."""
        return 1

    @property
    @abstractmethod
    def max_batch_tokens(self) -> int:
        """The most tokens of one forward."""

    @property
    @abstractmethod
    def n_vocab(self) -> int:
        """The width of a row of logits."""

    # ---- what K/V is

    @property
    def fingerprint(self) -> str:
        """A name for all that K/V and logits depend on beside the tokens: K/V of another name cannot stand for it."""
        return ""

    @property
    def description(self) -> Mapping[str, str]:
        """What the fingerprint stands for, for people: names and values, as far as they are known."""
        return {}

    @property
    def adapters(self) -> AdapterSet:
        """What a sequence is opened with where nothing else is asked for.

        Not part of `fingerprint`: a sequence's own is `AdapterSet.fingerprint_over` it.
        """
        return NO_ADAPTERS

    @property
    def bytes_per_cell(self) -> int:
        """Bytes that the K/V of a cell takes; 0 where that is not known."""
        return 0

    def count_cells(self, sequences: Iterable[int]) -> int:
        """How many distinct cells these sequences own. The default does not know what they share."""
        return sum(self.length(sequence) for sequence in sequences)

    # ---- sequences

    @abstractmethod
    def open(self, adapters: AdapterSet | None = None) -> int:
        """A new, empty sequence, computed with these adapters (None: `self.adapters`), and so are its clones.

        Raises OptionError for adapters that cannot be had.
        """

    @abstractmethod
    def close(self, sequence: int) -> None:
        """Drop a sequence; cells that nobody else owns are free again."""

    @abstractmethod
    def rewind(self, sequence: int, to: int) -> None:
        """Drop what a sequence holds from position `to` on, cells of a forward that failed included.

        Raises RewindError, with nothing changed, where `can_rewind` says no, and where what failed cannot be undone.
        """

    def can_rewind(self, sequence: int, to: int) -> bool:  # noqa: ARG002  # the default keeps every position
        """Whether the sequence can go back to `to`; to 0, and to where it is, it always can."""
        return True

    @abstractmethod
    def length(self, sequence: int) -> int:
        """Committed positions of a sequence."""

    @property
    def clones_anywhere(self) -> bool:
        """Whether a sequence can be cloned at each of its positions, so that a longer one serves for all shorter."""
        return False

    def clone(self, source: int, upto: int) -> int | None:  # noqa: ARG002  # the default refuses
        """A new sequence of the first `upto` positions of `source`, or None where that cannot be had."""
        return None

    # ---- K/V outside of the executor

    def read_image(self, parts: Sequence[tuple[int, int]]) -> ImageReader | None:  # noqa: ARG002
        """What reads the K/V of sequences, each up to a position, or None (the default) where that cannot be had.

        Raises UnknownSequenceError and PositionError.
        """
        return None

    def write_image(self, image: KvImage) -> ImageWriter | None:  # noqa: ARG002  # the default refuses
        """What opens sequences and brings their K/V in, or None (the default) where that cannot be had.

        Their cells are taken when it returns. Raises InputError for an image that cannot be one of this executor,
        PoolFullError and other refusals, with nothing changed.
        """
        return None

    # ---- what can wait

    def want_idle_work(self) -> None:
        """Let `do_idle_work` do what it does only where it was asked for. Does nothing where there is no such work."""
        return

    def do_idle_work(self) -> bool:
        """Work that can wait, 50 ms of it at most; whether there is more. Called when nobody waits for anything."""
        return False

    # ---- steps

    def accepts(self, prepared: PreparedInput) -> bool:  # noqa: ARG002  # the default knows no kind
        """Whether `forward` can compute this input with this model."""
        return False

    @abstractmethod
    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Compute one step: logits f32 [outputs, n_vocab], in batch order.

        All its sequences have the same adapters. Raises PoolFullError and other refusals with nothing changed;
        AbortedError after `abort`, and any other error of the computation, with the step's cells claimed until its
        sequences are rewound or closed.
        """

    def forward_outputs(self, batch: Batch, needs: Sequence[RowNeed]) -> Outputs:
        """As `forward`, with no more of each output than is needed: `needs` has one for each, in batch order.

        The default computes whole rows. Raises InputError for needs that do not go with the batch, too.
        """
        check_needs(needs, batch.n_outputs, self.n_vocab)
        return WholeRows(self.forward(batch), needs)

    def forward_hidden(self, batch: Batch) -> npt.NDArray[np.float32]:  # noqa: ARG002  # the default refuses
        """As `forward`, with the normed hidden states in place of logits: f32 [outputs, width], what embeddings are of.

        Raises InputError where they cannot be had, with nothing changed.
        """
        raise InputError(f"{type(self).__name__} gives no hidden states")

    def abort(self) -> None:  # noqa: B027  # the default is to do nothing
        """Let the running forward end soon with AbortedError. Does nothing where that is not possible.

        Holds until `clear_abort`: a forward that begins meanwhile is aborted, too.
        """

    def clear_abort(self) -> None:  # noqa: B027  # the default is to do nothing
        """Let forwards run again."""
