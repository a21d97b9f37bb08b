"""K/V that leaves an executor and comes into another one: the same bytes, the same logits, shared cells once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_rows import model_file
from engines import executor_over, feed, loaded
from moves import move_at_every_step
from tiny_models import VOCAB, write_gemma3, write_llama

from ggml_engine.errors import AllocationError, CacheError, ClosedError, InputError, PositionError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.image import KvImage, Rows
from ggml_engine.models.model import Model
from ggml_engine.pool import kv_pool, pool_rows, registry
from ggml_engine.pool.cell_cache import GgmlCellCache
from ggml_engine.pool.kv_pool import GgmlKvPool

TOKENS: list[int] = np.random.default_rng(7).integers(3, VOCAB, 200).tolist()
COLUMNS = {"attention": "matmul", "v_layout": "columns"}
ROWS = {"attention": "flash", "v_layout": "rows"}
MODES: dict[str, dict[str, Any]] = {
    "columns f16": {**COLUMNS},
    "columns f32": {**COLUMNS, "k_type": "f32", "v_type": "f32"},
    "columns bf16, K q8_0": {**COLUMNS, "k_type": "q8_0", "v_type": "bf16"},
    "rows f16": {**ROWS},
    "rows q8_0": {**ROWS, "k_type": "q8_0", "v_type": "q8_0"},
    "rows q4_0": {**ROWS, "k_type": "q4_0", "v_type": "q4_0"},
    "cells f16": {"attention": "cells"},
    "cells q8_0": {"attention": "cells", "k_type": "q8_0", "v_type": "q8_0"},
    "matmul over rows": {"attention": "matmul", "v_layout": "rows"},
    "deterministic": {"deterministic": True},
}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Model]:
    path: Path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    if request.param == "llama":
        write_llama(path, head_size=32, n_head_kv=[1, 2], n_layer=2, n_head=4)
    else:
        write_gemma3(path, window=5, n_layer=3, pattern=2)
    with loaded(path, threads=1) as model:
        yield model


@pytest.mark.parametrize("row", ["gemma4 per layer inputs, shared layers", "deepseek2", "llama4"])
@pytest.mark.parametrize("mode", [{}, {**ROWS}], ids=["default", "rows"])
def test_layers_that_share_and_values_inside_keys_come_back(row: str, mode: dict[str, Any]) -> None:
    options = {"capacity": 256, **mode}
    with loaded(model_file(row), threads=1) as model:
        with executor_over(model, **options) as executor:
            sequence = executor.open()
            feed(executor, sequence, TOKENS[:50], 32)
            image, rows = taken(executor, [(sequence, 50)])
            assert image.row_bytes == executor.bytes_per_cell
            want = feed(executor, sequence, TOKENS[50:70])
        with executor_over(model, **options) as executor:
            (sequence,) = brought(executor, image, rows)
            assert feed(executor, sequence, TOKENS[50:70]).tobytes() == want.tobytes()


def taken(executor: GgmlExecutor, parts: list[tuple[int, int]], n_part: int = 7) -> tuple[KvImage, Rows]:
    """The image of sequences, and its rows, read in parts."""
    reader = executor.read_image(parts)
    assert reader is not None
    image = reader.image
    rows = [reader.read(start, min(n_part, image.n_rows - start)) for start in range(0, image.n_rows, n_part)]
    return image, np.concatenate([np.empty((0, image.row_bytes), np.uint8), *rows])


def brought(executor: GgmlExecutor, image: KvImage, rows: Rows, n_part: int = 9) -> tuple[int, ...]:
    """The sequences of an image, written in parts."""
    writer = executor.write_image(image)
    assert writer is not None
    for start in range(0, image.n_rows, n_part):
        writer.write(rows[start : start + n_part])
    return writer.commit()


def stored(executor: GgmlExecutor, sequence: int) -> bytes:
    """K and V of a sequence's cells, as numbers."""
    pool = executor.cache.pool
    cells = executor.cache.cells_of(sequence)  # type: ignore[attr-defined]
    return b"".join(part.tobytes() for il in range(len(pool.layers)) for c in cells for part in pool.cell(il, int(c)))


@pytest.mark.parametrize("kind", ["batched_cell", "sequence"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_logits_after_loading_are_the_same_bytes(model: Model, mode: dict[str, Any], kind: str) -> None:
    options = {"capacity": 256, "cache_kind": kind, **mode}
    with executor_over(model, **options) as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:90], 64)
        image, rows = taken(executor, [(sequence, 90)])
        assert image.row_bytes == executor.bytes_per_cell
        content = stored(executor, sequence)
        want = [feed(executor, sequence, TOKENS[90:130]), feed(executor, sequence, TOKENS[130:140], 1)]
    with executor_over(model, **options) as executor:
        (sequence,) = brought(executor, image, rows)
        assert executor.length(sequence) == 90
        assert stored(executor, sequence) == content
        found = [feed(executor, sequence, TOKENS[90:130]), feed(executor, sequence, TOKENS[130:140], 1)]
    assert [each.tobytes() for each in found] == [each.tobytes() for each in want]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_clones_come_back_sharing_and_others_are_untouched(model: Model, mode: dict[str, Any]) -> None:
    options = {"capacity": 512, **mode}
    with executor_over(model, **options) as executor:
        trunk = executor.open()
        feed(executor, trunk, TOKENS[:70])
        children = [executor.clone(trunk, 70), executor.clone(trunk, 33)]
        for i, child in enumerate(children):
            assert child is not None
            feed(executor, child, TOKENS[80 + i : 90 + i])
        everybody = [trunk, *[child for child in children if child is not None]]
        image, rows = taken(executor, [(each, executor.length(each)) for each in everybody])
        n_cells = executor.count_cells(everybody)
        assert image.n_rows == image.n_cells == n_cells == 90
        contents = [stored(executor, each) for each in everybody]
        want = [feed(executor, each, TOKENS[100:110]) for each in everybody]
    with executor_over(model, **options) as executor:
        loaded_sequences = brought(executor, image, rows)
        assert executor.count_cells(loaded_sequences) == n_cells
        found = [feed(executor, each, TOKENS[100:110]) for each in loaded_sequences]
        assert [each.tobytes() for each in found] == [each.tobytes() for each in want]
    with executor_over(model, **options) as executor:
        live = executor.open()
        feed(executor, live, TOKENS[:20])  # the pool has to grow under it, and its graphs have to go
        before = stored(executor, live)
        loaded_sequences = brought(executor, image, rows)
        assert [stored(executor, each) for each in loaded_sequences] == contents
        assert stored(executor, live) == before
        beside = feed(executor, live, TOKENS[20:40], 1)
    with executor_over(model, **options) as executor:
        live = executor.open()
        feed(executor, live, TOKENS[:20])
        assert feed(executor, live, TOKENS[20:40], 1).tobytes() == beside.tobytes()


def test_a_beginning_can_be_taken_while_its_sequence_goes_on(model: Model) -> None:
    with executor_over(model, capacity=256) as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:30])
        reader = executor.read_image([(sequence, 20)])
        assert reader is not None
        first = reader.read(0, 20)
        feed(executor, sequence, TOKENS[30:60])
        assert reader.read(0, 20).tobytes() == first.tobytes()
        executor.rewind(sequence, 10)
        with pytest.raises(CacheError, match="are others"):
            reader.read(0, 20)
        with pytest.raises(PositionError, match="11 positions of sequence"):
            executor.read_image([(sequence, 11)])


def test_cells_that_are_read_or_brought_in_stay_where_they_are_while_others_are_moved(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with executor_over(model, capacity=256, run=4, read_block=8, attention="flash", v_layout="rows") as executor:
        source, beside, gone = (executor.open() for _ in range(3))
        for start in range(0, 32, 4):  # in turns, a run each
            for sequence in (source, beside, gone):
                feed(executor, sequence, TOKENS[start : start + 4])
        image, rows = taken(executor, [(source, 32)])
        clone = executor.clone(source, 32)
        assert clone is not None
        reader = executor.read_image([(clone, 32)])
        writer = executor.write_image(image)
        assert reader is not None
        assert writer is not None
        executor.close(gone)
        move_at_every_step(monkeypatch)
        found = []
        for start in range(0, 32, 8):
            found.append(reader.read(start, 8))
            writer.write(rows[start : start + 8])
            for sequence in (source, beside):
                feed(executor, sequence, TOKENS[32 + start : 40 + start])
        assert executor.stats()["moves"] > 0, "nothing was moved"
        assert np.concatenate(found).tobytes() == rows.tobytes()
        (loaded_sequence,) = writer.commit()
        assert stored(executor, loaded_sequence) == stored(executor, clone)
        executor.close(source)
        feed(executor, beside, TOKENS[:4])
        assert reader.read(0, 32).tobytes() == rows.tobytes()


def test_rows_do_not_depend_on_the_layout(model: Model) -> None:
    with executor_over(model, capacity=128, **COLUMNS) as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:50])
        image, rows = taken(executor, [(sequence, 50)])
        content = stored(executor, sequence)
    with executor_over(model, capacity=128, **ROWS) as executor:
        (sequence,) = brought(executor, image, rows)
        assert stored(executor, sequence) == content


@pytest.mark.parametrize("mode", [COLUMNS, ROWS], ids=["columns", "rows"])
def test_memory_that_python_cannot_reach_is_copied(
    model: Model, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with executor_over(model, capacity=128, **mode) as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:50])
        image, rows = taken(executor, [(sequence, 50)])
        content = stored(executor, sequence)
        monkeypatch.setattr(pool_rows, "host_view", lambda *_: None)
        assert taken(executor, [(sequence, 50)])[1].tobytes() == rows.tobytes()
        (again,) = brought(executor, image, rows)
        assert stored(executor, again) == content


@pytest.mark.parametrize(("kind", "bits"), [("f32", 0x7F800000), ("f16", 0xFC00), ("bf16", 0x7FC0), ("q8_0", 0x7E01)])
def test_numbers_that_are_not_finite_are_not_let_in(model: Model, kind: str, bits: int) -> None:
    """A masked row is read as well, and nothing times NaN is NaN."""
    with executor_over(model, capacity=128, **ROWS, k_type=kind, v_type=kind) as executor:
        live = executor.open()
        feed(executor, live, TOKENS[:10])
        before = stored(executor, live)
        image, rows = taken(executor, [(live, 10)])
        width = 4 if kind == "f32" else 2
        last = rows.shape[1] - (34 if kind == "q8_0" else width)  # of V of the last layer
        for start in (0, last):
            bad = rows.copy()
            bad[-1, start : start + width] = np.frombuffer(bits.to_bytes(width, "little"), np.uint8)
            writer = executor.write_image(image)
            assert writer is not None
            with pytest.raises(InputError, match="not finite"):
                writer.write(bad)
            cells = writer._adopted().cells
            assert not executor._rows.read(cells[cells < executor.cache.pool.rows])[:, start].any()
            writer.close()
        assert stored(executor, live) == before
        assert executor.free_cells == executor.capacity - 10


def test_a_writer_that_is_not_finished_gives_its_cells_back(model: Model) -> None:
    with executor_over(model, capacity=128) as executor:
        live = executor.open()
        feed(executor, live, TOKENS[:30])
        image, rows = taken(executor, [(live, 30)])
        writer = executor.write_image(image)
        assert writer is not None
        assert executor.free_cells == executor.capacity - 60
        writer.write(rows[:29])
        with pytest.raises(InputError, match="30 rows, 29 were given"):
            writer.commit()
        with pytest.raises(InputError, match="2 rows are given, 1 are missing"):
            writer.write(rows[:2])
        writer.close()
        writer.close()
        for call in (writer.commit, lambda: writer.write(rows[:1])):
            with pytest.raises(InputError, match="given up"):
                call()
        assert executor.free_cells == executor.capacity - 30
        assert executor.cache.open_sequences == (live,)


def test_storage_that_cannot_be_had_leaves_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with executor_over(model, capacity=512) as executor:
        live = executor.open()
        feed(executor, live, TOKENS[:60])
        image, rows = taken(executor, [(live, 60)])

        def refuse(*_: object) -> None:
            raise AllocationError("no memory")

        with monkeypatch.context() as patched:
            patched.setattr(kv_pool, "allocate_tensors", refuse)
            with suppress(AllocationError):
                for _ in range(7):
                    before = executor.cache.used_cells, executor.cache.open_sequences
                    brought(executor, image, rows)
            assert (executor.cache.used_cells, executor.cache.open_sequences) == before
            assert executor.cache.used_cells < 7 * 60
        brought(executor, image, rows)


def test_images_of_other_shapes_are_refused(model: Model) -> None:
    with executor_over(model, capacity=128) as executor:
        table = np.arange(3)
        n_bytes = executor.bytes_per_cell
        bad = [
            KvImage(n_bytes + 1, 3, (3,), (table,)),
            KvImage(n_bytes, 3, (2,), (table,)),
            KvImage(n_bytes, 4, (3,), (table,)),
        ]
        for image in bad:
            with pytest.raises(InputError):
                executor.write_image(image)
        assert executor.cache.open_sequences == ()


def test_a_cache_that_is_not_made_of_cells_has_no_images(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden:
        """Somebody's cache, which is no CellCache."""

        def __init__(self, cache: GgmlCellCache) -> None:
            self._cache = cache

        def __getattr__(self, name: str) -> Any:
            return getattr(self._cache, name)

    monkeypatch.setattr(registry, "_BUILDERS", {"hidden": lambda config: Hidden(registry._build_cells(config))})
    with executor_over(model, capacity=64, cache_kind="hidden") as executor:
        sequence = executor.open()
        assert executor.read_image([(sequence, 0)]) is None
        assert executor.write_image(KvImage(executor.bytes_per_cell, 0, (0,), (np.arange(0),))) is None


def test_a_closed_executor_has_no_images(model: Model) -> None:
    with executor_over(model, capacity=64) as executor:
        sequence = executor.open()
        reader = executor.read_image([(sequence, 0)])
        image = KvImage(executor.bytes_per_cell, 0, (0,), (np.arange(0),))
        executor.close(sequence)
    assert reader is not None
    for call in (lambda: executor.read_image([]), lambda: executor.write_image(image), lambda: reader.read(0, 0)):
        with pytest.raises(ClosedError):
            call()


def test_the_description_names_what_the_fingerprint_stands_for(model: Model) -> None:
    with executor_over(model, capacity=64, **ROWS, k_type="q8_0") as executor:
        found = executor.description
        assert found["architecture"] == model.hp.architecture
        assert (found["k_type"], found["v_type"], found["v_layout"]) == ("q8_0", "f16", "rows")
        assert all(isinstance(value, str) for value in found.values())
        assert isinstance(executor.cache.pool, GgmlKvPool)
        executor.forward(Batch.of_sequence(executor.open(), TOKENS[:2]))
