"""What `GGUFFile` gives for well-formed files, its life time, and its agreement with gguf-py's writer."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from gguf_forge import ARRAY, BOOL, FLOAT64, INT8, INT64, STRING, UINT8, UINT16, UINT64, GGUFForge, tiny_forge

from ggml_engine.errors import ClosedError, GGUFError, HyperparameterError, WeightError
from ggml_engine.ggml.gguf import GGUFArray, GGUFFile, GGUFType, TensorType
from ggml_engine.ggml.tensor_types import describe_refusal

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_forge().write(tmp_path / "tiny.gguf")


def open_forge(forge: GGUFForge, tmp_path: Path, **options: Any) -> GGUFFile:
    return GGUFFile.open(forge.write(tmp_path / "model.gguf"), **options)


def refused(path: Any, **options: Any) -> GGUFError:
    with pytest.raises(GGUFError) as caught:
        GGUFFile.open(path, **options)
    return caught.value


# ---- Values


@pytest.mark.parametrize("in_memory_map", [True, False])
def test_a_file_gives_its_metadata_and_tensors_mapped_or_copied(tiny: Path, in_memory_map: bool) -> None:
    with GGUFFile.open(tiny, mmap=in_memory_map) as file:
        assert (file.path, file.version, file.alignment, file.warnings) == (str(tiny), 3, 32, [])
        assert file.n_bytes == tiny.stat().st_size
        assert list(file.metadata) == [value.label for value in tiny_forge().values]
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["llama.flag"] is True
        tokens, scores = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.scores"]
        assert isinstance(tokens, GGUFArray)
        assert isinstance(scores, GGUFArray)
        assert (tokens.kind, len(tokens), tokens.strings()) == (GGUFType.STRING, 3, [b"<s>", b"a", b""])
        assert [tokens.text(index) for index in range(3)] == ["<s>", "a", ""]
        assert scores.numpy().tolist() == [0.0, -1.0, -2.5]
        assert list(file.tensors) == ["a.weight", "b.weight", "c.weight"]
        info = file.tensors["b.weight"]
        assert (info.shape, info.type, info.n_bytes, info.part) == ((32, 2), TensorType.Q4_0, 36, 0)
        assert bytes(file.tensor_bytes("b.weight")) == bytes(range(36))
        weights = np.frombuffer(file.tensor_bytes("a.weight"), np.float32)
        assert weights.tolist() == list(range(12))
        assert info.offset % file.alignment == 0
        assert bytes(file.parts[0].buffer[info.offset :][: info.n_bytes]) == bytes(range(36))
        del weights


SCALARS = [
    (0, 200),
    (1, -100),
    (2, 60_000),
    (3, -30_000),
    (4, 4_000_000_000),
    (5, -2_000_000_000),
    (6, 0.5),
    (7, False),
    (10, 1 << 63),
    (11, -(1 << 63)),
    (12, 1e300),
]


@pytest.mark.parametrize(("kind", "value"), SCALARS)
def test_each_scalar_type_gives_its_value_and_its_kind(tmp_path: Path, kind: int, value: object) -> None:
    forge = GGUFForge()
    forge.put("k", value, kind=kind)
    with open_forge(forge, tmp_path) as file:
        assert file.metadata["k"] == value
        assert type(file.metadata["k"]) is type(value)
        assert file.kind("k") is GGUFType(kind)


@pytest.mark.parametrize("name", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool"])
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_an_array_of_numbers_is_a_read_only_view_of_the_file(tmp_path: Path, name: str, n: int) -> None:
    wanted = np.arange(n).astype(name)
    forge = GGUFForge()
    forge.put("k", wanted)
    with open_forge(forge, tmp_path) as file:
        array = file.metadata.array("k")
        found = array.numpy()
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
        assert not found.flags.writeable
        assert not found.flags.owndata or n == 0
        assert len(array) == n
        with pytest.raises(TypeError, match="no strings"):
            array.strings()
        with pytest.raises(TypeError, match="no strings"):
            array.text(0)


@pytest.mark.parametrize("in_memory_map", [True, False])
def test_nothing_that_the_file_hands_out_can_be_written(tiny: Path, in_memory_map: bool) -> None:
    with GGUFFile.open(tiny, mmap=in_memory_map) as file:
        assert file.tensor_bytes("a.weight").readonly
        assert file.parts[0].buffer.readonly
        with pytest.raises(TypeError):
            file.metadata["x"] = 1  # type: ignore[index]
        with pytest.raises(TypeError):
            file.tensors["x"] = 1  # type: ignore[index]


@pytest.mark.parametrize("in_memory_map", [True, False])
def test_a_part_starts_at_a_page_boundary(tiny: Path, in_memory_map: bool) -> None:
    with GGUFFile.open(tiny, mmap=in_memory_map) as file:
        address = np.frombuffer(file.parts[0].buffer, np.uint8).__array_interface__["data"][0]
        assert address % mmap.PAGESIZE == 0


def test_free_text_may_hold_nul_and_bad_utf8(tmp_path: Path) -> None:
    forge = GGUFForge()
    forge.put("k", b"a\0b\xff")
    forge.put("t", [b"\xe2\x82", b"\0", "€"])
    with open_forge(forge, tmp_path) as file:
        assert file.metadata["k"] == "a\0b\ufffd"
        assert file.metadata.raw("k") == b"a\0b\xff"
        tokens = file.metadata.array("t")
        assert [tokens.text(index) for index in range(3)] == ["\ufffd", "\0", "€"]
        assert [tokens.raw(index) for index in range(3)] == tokens.strings() == [b"\xe2\x82", b"\0", "€".encode()]


@pytest.mark.parametrize("index", [-1, 3, 1 << 64])
def test_a_string_outside_its_array_is_an_index_error(tiny: Path, index: int) -> None:
    with GGUFFile.open(tiny) as file, pytest.raises(IndexError, match="of an array of 3"):
        file.metadata.array("tokenizer.ggml.tokens").text(index)


def test_an_empty_array_of_strings_has_none(tmp_path: Path) -> None:
    forge = GGUFForge()
    forge.put("k", [], element_kind=STRING)
    forge.put("after", 7)
    with open_forge(forge, tmp_path) as file:
        assert file.metadata.array("k").strings() == []
        assert file.metadata["after"] == 7


def test_numbers_cannot_be_had_from_an_array_of_strings(tiny: Path) -> None:
    with GGUFFile.open(tiny) as file, pytest.raises(TypeError, match="no numbers"):
        file.metadata.array("tokenizer.ggml.tokens").numpy()


def typed_file(tmp_path: Path) -> GGUFFile:
    forge = GGUFForge()
    forge.put("integer", 5)
    forge.put("small", -5, kind=INT8)
    forge.put("wide", 1 << 40, kind=UINT64)
    forge.put("number", 0.5)
    forge.put("double", 0.25, kind=FLOAT64)
    forge.put("flag", True)
    forge.put("text", "x")
    forge.put("array", np.array([1], np.int32))
    return open_forge(forge, tmp_path)


def test_the_typed_getters_give_values_of_their_type(tmp_path: Path) -> None:
    with typed_file(tmp_path) as file:
        metadata = file.metadata
        assert (metadata.integer("integer"), metadata.integer("small"), metadata.integer("wide")) == (5, -5, 1 << 40)
        assert (metadata.number("number"), metadata.number("double")) == (0.5, 0.25)
        assert metadata.flag("flag") is True
        assert (metadata.text("text"), metadata.raw("text")) == ("x", b"x")
        assert metadata.array("array", GGUFType.UINT32, GGUFType.INT32).numpy().tolist() == [1]


GETTERS = {
    "integer": {"integer", "small", "wide"},
    "number": {"number", "double"},
    "flag": {"flag"},
    "text": {"text"},
    "array": {"array"},
}


@pytest.mark.parametrize("getter", GETTERS)
def test_a_typed_getter_refuses_every_other_type_and_a_missing_key(tmp_path: Path, getter: str) -> None:
    with typed_file(tmp_path) as file:
        for key in set(file.metadata) - GETTERS[getter]:
            for name in (getter, f"find_{getter}"):
                with pytest.raises(HyperparameterError, match=r"must be an? .*, the file has") as caught:
                    getattr(file.metadata, name)(key)
                assert caught.value.key == key
        assert getattr(file.metadata, f"find_{getter}")("absent") is None
        with pytest.raises(HyperparameterError, match="missing"):
            getattr(file.metadata, getter)("absent")


def test_an_array_of_another_element_type_is_named(tmp_path: Path) -> None:
    with typed_file(tmp_path) as file, pytest.raises(HyperparameterError, match=r"array of FLOAT32.* array of INT32"):
        file.metadata.array("array", GGUFType.FLOAT32)


def test_an_unknown_tensor_is_a_weight_error_with_its_name(tiny: Path) -> None:
    with GGUFFile.open(tiny) as file, pytest.raises(WeightError, match="nope") as caught:
        file.tensor_bytes("nope")
    assert caught.value.tensor == "nope"


def test_a_file_without_tensors_is_a_file(tmp_path: Path) -> None:
    forge = GGUFForge()
    forge.put("k", 1)
    with open_forge(forge, tmp_path) as file:
        assert (len(file.tensors), file.warnings) == (0, [])
    with open_forge(GGUFForge(), tmp_path) as file:
        assert (len(file.metadata), len(file.tensors)) == (0, 0)


def test_the_data_of_the_last_tensor_need_no_padding(tmp_path: Path) -> None:
    image = tiny_forge().build()
    path = tmp_path / "m.gguf"
    path.write_bytes(image.data.rstrip(b"\0"))
    with GGUFFile.open(path) as file:
        info = file.tensors["c.weight"]
        assert info.offset + info.n_bytes == file.n_bytes == len(image.data) - 26
        assert file.warnings == []


def test_an_alignment_of_the_file_moves_the_data(tmp_path: Path) -> None:
    forge = GGUFForge(alignment=4096)
    forge.put("general.alignment", 4096)
    forge.tensor("a", np.ones(3, np.float32))
    forge.tensor("b", np.full(3, 2, np.float32))
    with open_forge(forge, tmp_path) as file:
        assert file.alignment == 4096
        assert [info.offset for info in file.tensors.values()] == [4096, 8192]
        assert bytes(file.tensor_bytes("b")) == np.full(3, 2, np.float32).tobytes()


# ---- Tensor types


def test_the_type_sizes_agree_with_gguf_py() -> None:
    reference = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items() if kind.name not in ("Q8_1", "Q8_K")}
    ours = {int(kind): (kind.block_size, kind.block_bytes) for kind in TensorType}
    assert ours.pop(42) == (64, 18)  # Q2_0: in ggml.h, not yet in gguf-py 0.19
    assert ours == reference


def test_the_type_names_agree_with_gguf_py() -> None:
    names = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {int(kind): names.get(int(kind), "Q2_0") for kind in TensorType} == {int(k): k.name for k in TensorType}


def test_the_value_types_agree_with_gguf_py() -> None:
    assert {kind.name: int(kind) for kind in GGUFType} == {kind.name: int(kind) for kind in gguf.GGUFValueType}


def test_only_float_and_quantised_types_can_multiply() -> None:
    assert {kind.name for kind in TensorType if not kind.can_multiply} == {"I8", "I16", "I32", "I64", "F64"}


def test_a_row_of_broken_blocks_has_no_size() -> None:
    assert TensorType.Q4_K.row_bytes(512) == 288
    assert TensorType.Q4_0.tensor_bytes((64, 3, 2)) == 216
    with pytest.raises(ValueError, match="33 elements are not a whole number of Q4_0 blocks of 32"):
        TensorType.Q4_0.row_bytes(33)


@pytest.mark.parametrize(("number", "text"), [(4, "Q4_2.*removed"), (15, "Q8_K.*computes"), (99, "99 is not one of")])
def test_a_refused_type_says_why(number: int, text: str) -> None:
    assert re.search(text, describe_refusal(number))


@pytest.mark.parametrize("kind", list(TensorType))
def test_every_storable_type_is_read_back(tmp_path: Path, kind: TensorType) -> None:
    forge = GGUFForge()
    data = bytes(index % 251 for index in range(3 * kind.block_bytes))
    forge.tensor("w", shape=(kind.block_size, 3), kind=int(kind), data=data)
    with open_forge(forge, tmp_path) as file:
        assert file.tensors["w"].type is kind
        assert bytes(file.tensor_bytes("w")) == data


# ---- Life time


def open_handles() -> int | None:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else None


@pytest.mark.parametrize("in_memory_map", [True, False])
def test_closing_gives_the_handle_back_and_may_be_repeated(tiny: Path, in_memory_map: bool) -> None:
    before = open_handles()
    file = GGUFFile.open(tiny, mmap=in_memory_map)
    tokens = file.metadata.array("tokenizer.ggml.tokens")
    buffer = file.tensor_bytes("a.weight")
    buffer.release()
    file.close()
    file.close()
    assert file.closed
    assert open_handles() == before
    for use in (
        lambda: file.tensor_bytes("a.weight"),
        lambda: file.parts[0].buffer,
        lambda: file.metadata["general.architecture"],
        tokens.strings,
        lambda: tokens.text(0),
        file.metadata.array("tokenizer.ggml.scores").numpy,
        file.__enter__,
    ):
        with pytest.raises(ClosedError, match=r"tiny\.gguf was closed"):
            use()
    assert file.metadata["general.alignment"] == 32
    assert "closed" in repr(file)


@pytest.mark.parametrize("in_memory_map", [True, False])
def test_views_taken_before_stay_valid_after_close_and_then_free_the_file(tiny: Path, in_memory_map: bool) -> None:
    before = open_handles()
    file = GGUFFile.open(tiny, mmap=in_memory_map)
    view = file.tensor_bytes("b.weight")
    whole = np.frombuffer(file.parts[0].buffer, np.uint8)
    scores = file.metadata.array("tokenizer.ggml.scores").numpy()
    file.close()
    file.close()
    assert bytes(view) == bytes(range(36))
    assert scores.tolist() == [0.0, -1.0, -2.5]
    assert whole[:4].tobytes() == b"GGUF"
    del view, whole, scores
    gc.collect()
    assert open_handles() == before


def test_a_file_that_nobody_closed_gives_its_handle_back(tiny: Path) -> None:
    before = open_handles()
    file = GGUFFile.open(tiny)
    del file
    gc.collect()
    assert open_handles() == before


def test_a_copy_does_not_see_what_happens_to_the_file(tiny: Path) -> None:
    with GGUFFile.open(tiny, mmap=False) as file:
        tiny.write_bytes(b"")
        assert bytes(file.tensor_bytes("b.weight")) == bytes(range(36))
        assert file.metadata["general.architecture"] == "llama"


def test_a_file_that_shrinks_while_it_is_copied_is_truncated(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    def before_shrinking(descriptor: int) -> os.stat_result:
        status = list(real(descriptor))
        status[6] += 100
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", before_shrinking)
    before = open_handles()
    assert refused(tiny, mmap=False).code == "truncated"
    assert refused(tiny, mmap=True).code == "truncated"
    assert open_handles() == before


def test_a_file_that_cannot_be_mapped_is_unreadable(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    before = open_handles()
    assert refused(tiny).code == "unreadable"
    assert open_handles() == before
    assert refused(tiny, mmap=False).code == "unreadable"
    assert open_handles() == before


def test_a_read_error_while_copying_is_unreadable(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None: ...
        def readinto(self, _: memoryview) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("io.FileIO", Broken)
    before = open_handles()
    error = refused(tiny, mmap=False)
    assert (error.code, "Input/output error" in str(error)) == ("unreadable", True)
    assert open_handles() == before


# ---- Row 66: things that are not regular files


@pytest.fixture
def run_limited() -> Callable[[str], str]:
    """Opens a path in a process of its own, so that an open that blocks fails the test instead of hanging it."""

    def run(path: str) -> str:
        code = (
            "import sys\nfrom ggml_engine.errors import GGUFError\nfrom ggml_engine.ggml.gguf import GGUFFile\n"
            "try:\n    GGUFFile.open(sys.argv[1])\nexcept GGUFError as error:\n    print(error.code)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    return run


if hasattr(os, "mkfifo"):

    def test_row_66_a_fifo_is_refused_at_once(tmp_path: Path, run_limited: Callable[[str], str]) -> None:
        os.mkfifo(tmp_path / "fifo")
        assert run_limited(str(tmp_path / "fifo")) == "not-a-file"


def test_row_66_a_directory_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path).code == "not-a-file"


def test_row_66_a_device_is_refused() -> None:
    assert refused(os.devnull).code == "not-a-file"
    for path in (path for path in ("/dev/zero", "/dev/tty", "/dev/urandom") if os.path.exists(path)):
        assert refused(path).code in ("not-a-file", "unreadable")


if hasattr(socket, "AF_UNIX"):

    def test_row_66_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)  # socket names are short
        with closing(socket.socket(socket.AF_UNIX)) as listener:
            listener.bind("s")
            assert refused("s").code == "not-a-file"


def test_row_66_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert refused(tmp_path / "a").code == "unreadable"


def test_row_66_an_unreadable_file_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Simulated: root may read everything.
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    error = refused(tiny)
    assert (error.code, "Permission denied" in str(error)) == ("unreadable", True)


@pytest.mark.parametrize("name", ["absent.gguf", "no/such/folder.gguf", "tiny.gguf/below", "a\0b"])
def test_a_missing_file_is_not_found(tiny: Path, name: str) -> None:
    error = refused(os.path.join(tiny.parent, name))
    assert (error.code, error.offset) == ("not-found", 0)


def test_a_link_to_a_model_is_followed(tiny: Path) -> None:
    link = tiny.parent / "link"
    link.symlink_to(tiny)
    with GGUFFile.open(link) as file:
        assert len(file.tensors) == 3


@pytest.mark.parametrize("convert", [str, os.fsencode, Path])
def test_a_path_may_be_of_any_kind(tiny: Path, convert: Callable[[Path], Any]) -> None:
    with GGUFFile.open(convert(tiny)) as file:
        assert file.path == str(tiny)


# ---- Split models


def write_split(folder: Path, count: int = 3, **changes: Any) -> list[Path]:
    """Three parts: the first without tensors, as llama-gguf-split can write it, the others with two each."""
    paths = []
    for number in range(count):
        forge = GGUFForge(alignment=changes.get("alignment", 32))
        if number == 0:
            forge.put("general.architecture", "llama")
        if "alignment" in changes:
            forge.put("general.alignment", changes["alignment"])
        forge.put("split.no", changes.get("numbers", range(count))[number], kind=UINT16)
        forge.put("split.count", changes.get("counts", [count] * count)[number], kind=UINT16)
        if changes.get("tensors_key", True):
            forge.put("split.tensors.count", changes.get("n_tensors", 2 * (count - 1)), kind=5)
        for index in range(2 if number else 0):
            name = changes.get("name", f"blk.{number}.{index}")
            forge.tensor(name, np.full(5, 10 * number + index, np.float32))
        paths.append(forge.write(folder / f"m-{number + 1:05}-of-{count:05}.gguf"))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
@pytest.mark.parametrize("in_memory_map", [True, False])
def test_any_part_of_a_split_model_opens_all_of_them(tmp_path: Path, given: int, in_memory_map: bool) -> None:
    paths = write_split(tmp_path)
    before = open_handles()
    with GGUFFile.open(paths[given], mmap=in_memory_map) as file:
        assert file.path == str(paths[0])
        assert [part.path for part in file.parts] == [str(path) for path in paths]
        assert file.metadata["general.architecture"] == "llama"
        assert [(name, info.part) for name, info in file.tensors.items()] == [
            ("blk.1.0", 1),
            ("blk.1.1", 1),
            ("blk.2.0", 2),
            ("blk.2.1", 2),
        ]
        assert file.n_bytes == sum(path.stat().st_size for path in paths)
        for number in (1, 2):
            for index in (0, 1):
                found = np.frombuffer(file.tensor_bytes(f"blk.{number}.{index}"), np.float32)
                assert found.tolist() == [10.0 * number + index] * 5
        del found
    assert open_handles() == before


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].unlink()
    before = open_handles()
    error = refused(paths[2])
    assert error.code == "missing-part"
    assert "part 2 of 3 is missing: m-00002-of-00003.gguf" in str(error)
    assert open_handles() == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"numbers": [0, 2, 1]}, "split.no"),
        ({"numbers": [0, 0, 2]}, "split.no"),
        ({"counts": [3, 2, 3]}, "split.no"),
        ({"counts": [3, 0, 3], "numbers": [0, 0, 2]}, "split.no"),
        ({"n_tensors": 5}, "split.tensors.count"),
        ({"tensors_key": False}, "split.tensors.count"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    paths = write_split(tmp_path, **changes)
    before = open_handles()
    error = refused(paths[0])
    assert (error.code, error.field) == ("bad-split", field)
    assert open_handles() == before


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path, count=3)
    third = GGUFForge()
    third.put("split.no", 2, kind=UINT16)
    third.put("split.count", 3, kind=UINT16)
    third.tensor("blk.2.0", np.ones(5, np.float32))
    third.tensor("blk.1.1", np.ones(5, np.float32))
    third.write(paths[2])
    before = open_handles()
    error = refused(paths[0])
    assert (error.code, error.path) == ("duplicate-tensor", str(paths[2]))
    assert open_handles() == before


def test_a_broken_part_is_named_by_its_path(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:-40])
    before = open_handles()
    error = refused(paths[0])
    assert (error.code, error.path) == ("data-beyond-file", str(paths[1]))
    paths[1].unlink()
    paths[1].mkdir()
    assert refused(paths[0]).code == "not-a-file"
    assert open_handles() == before


def test_a_part_under_another_name_says_which_name_it_needs(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    renamed = paths[1].rename(tmp_path / "part-two.gguf")
    assert "-00002-of-00003.gguf" in str(refused(renamed))
    swapped = tmp_path / "m-00007-of-00009.gguf"
    swapped.write_bytes(paths[0].read_bytes())
    assert refused(swapped).code == "bad-split"


def test_the_parts_use_their_own_alignment(tmp_path: Path) -> None:
    paths = write_split(tmp_path, alignment=64)
    with GGUFFile.open(paths[0]) as file:
        assert [part.alignment for part in file.parts] == [64, 64, 64]


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_file_with_leftover_split_keys_is_a_single_file(tmp_path: Path, count: int) -> None:
    forge = GGUFForge()
    forge.put("split.no", 0, kind=UINT16)
    forge.put("split.count", count, kind=UINT16)
    forge.put("split.tensors.count", 99, kind=5)
    with open_forge(forge, tmp_path) as file:
        assert len(file.parts) == 1


# ---- Warnings and speed


def test_row_35_bytes_after_the_end_are_warned_of_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.gguf"
    image = tiny_forge().build()
    path.write_bytes(image.data + b"garbage")
    with caplog.at_level(logging.WARNING, "ggml_engine.gguf"), GGUFFile.open(path) as file:
        assert file.warnings == [f"{path}: 7 bytes after the end of the model (byte {len(image.data)})"]
        assert [record.getMessage() for record in caplog.records] == file.warnings
        assert file.n_bytes == len(image.data) + 7


def test_a_vocabulary_of_a_large_model_is_located_and_read_quickly(tmp_path: Path) -> None:
    n = 262_144
    words = [b"w%d" % index for index in range(n)]
    payload = b"".join(struct.pack("<Q", len(word)) + word for word in words)
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", ARRAY, STRING, n)
    path = tmp_path / "m.gguf"
    path.write_bytes(head + payload)
    start = time.thread_time()
    with GGUFFile.open(path) as file:
        opened = time.thread_time()
        assert file.metadata.array("k").strings() == words
        assert file.metadata.array("k").text(n - 1) == f"w{n - 1}"
        # Typically 30 and 50 ms; the bounds only tell a linear pass from a quadratic one.
        assert opened - start < 3
        assert time.thread_time() - opened < 3


# ---- Agreement with gguf-py


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_of_gguf_py_gives_the_same_metadata_and_tensors(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, tuple[str, Any]] = {
        "x.u8": ("uint8", 200),
        "x.i8": ("int8", -3),
        "x.u16": ("uint16", 60_000),
        "x.i16": ("int16", -30_000),
        "x.u32": ("uint32", 1 << 31),
        "x.i32": ("int32", -5),
        "x.u64": ("uint64", 1 << 63),
        "x.i64": ("int64", -(1 << 62)),
        "x.f32": ("float32", 0.25),
        "x.f64": ("float64", 1e-300),
        "x.bool": ("bool", True),
        "x.text": ("string", "naïve ☃"),
    }
    for key, (kind, value) in values.items():
        getattr(writer, f"add_{kind}")(key, value)
    writer.add_array("x.words", ["a", "", "☃"])
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.floats", [0.5, -0.5])
    writer.add_custom_alignment(64)
    tensors: dict[str, tuple[np.ndarray, TensorType]] = {
        "f32": (rng.standard_normal((3, 5, 2)).astype(np.float32), TensorType.F32),
        "f16": (rng.standard_normal((7,)).astype(np.float16), TensorType.F16),
        "q8": (
            gguf.quantize(rng.standard_normal((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0),
            TensorType.Q8_0,
        ),
        "i32": (rng.integers(0, 9, (2, 2), np.int32), TensorType.I32),
    }
    for name, (array, tensor_type) in tensors.items():
        is_q8 = tensor_type is TensorType.Q8_0
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.Q8_0 if is_q8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if version == 2:
        data = bytearray(path.read_bytes())
        data[4] = 2
        path.write_bytes(data)

    reader = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        assert (file.version, file.alignment, file.warnings) == (version, 64, [])
        assert list(file.metadata) == [key for key in reader.fields if not key.startswith("GGUF.")]
        for key, (_, value) in values.items():
            assert file.metadata[key] == value
            assert int(file.kind(key)) == int(reader.fields[key].types[0])
        assert file.metadata.array("x.words").strings() == [b"a", b"", "☃".encode()]
        assert file.metadata.array("x.ints", GGUFType.INT32).numpy().tolist() == [1, -2, 3]
        assert file.metadata.array("x.floats", GGUFType.FLOAT32).numpy().tolist() == [0.5, -0.5]
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors] == list(tensors)
        for tensor in reader.tensors:
            info = file.tensors[tensor.name]
            assert info.shape == tuple(tensor.shape.tolist())
            assert (int(info.type), info.n_bytes, info.offset) == (
                int(tensor.tensor_type),
                tensor.n_bytes,
                tensor.data_offset,
            )
            assert bytes(file.tensor_bytes(tensor.name)) == tensors[tensor.name][0].tobytes()


def test_the_split_files_of_gguf_py_open_as_one(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    for index in range(5):
        writer.add_tensor(f"t{index}", np.full((4, 8), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 3
    with GGUFFile.open(paths[1]) as file:
        assert [info.part for info in file.tensors.values()] == [0, 0, 1, 1, 2]
        for index in range(5):
            assert file.tensor_bytes(f"t{index}")[:4] == struct.pack("<f", index)


def test_the_parser_needs_no_native_library() -> None:
    code = (
        "import sys\nimport ggml_engine.ggml.gguf\n"
        "print([name for name in ('cffi', '_cffi_backend', 'gguf', 'llama_cpp') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_forge_writes_bools_and_bytes_as_they_are(tmp_path: Path) -> None:
    forge = GGUFForge()
    forge.put("k", [True, False], element_kind=BOOL)
    forge.put("b", b"\x01\x02", kind=ARRAY, element_kind=UINT8)
    forge.put("n", [-1, 1], element_kind=INT64)
    with open_forge(forge, tmp_path) as file:
        assert file.metadata.array("k").numpy().tolist() == [True, False]
        assert file.metadata.array("b").numpy().tolist() == [1, 2]
        assert file.metadata.array("n").numpy().tolist() == [-1, 1]
