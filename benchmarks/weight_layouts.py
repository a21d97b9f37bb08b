"""The matrix products of a model's layers with its weights in other layouts, by the number of tokens.

    python benchmarks/weight_layouts.py smollm2 gemma3-270m

Graphs of nothing but these products: every matrix of the layers times activations of n columns, the output matrix
left out, since of a prompt it sees one token. "file" is as they are loaded, "panels" the same multiplied by the
package's own panels where these take a type, as the engine does. The others are made of the file's values by ggml: f32
is the same values, what is quantised again is for its speed alone. Each lies rearranged where ggml has a form for it.
The layouts take turns after a warm-up; printed are median milliseconds, the time of "file" over it turn by turn (above
1 is faster), and the spread of that. `--layers` bounds how many layers are multiplied (times are of those). Run it
alone on the machine: ggml's threads spin.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from ggml_engine.ggml.backends import (
    Backend,
    Buffer,
    Graph,
    allocate_tensors,
    buffer_type_name,
    cpu_device,
    extra_buffer_types,
    get_array,
    set_data,
    supports_op,
)
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.joint_kernel import find_joint_kernel
from ggml_engine.ggml.library import Libraries, ffi, load
from ggml_engine.ggml.ops import GraphBuilder, Tensor, TensorContext
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.known_models import find_model
from ggml_engine.models.sizes import layer_of

LAYOUTS = ("file", "panels", "f16", "bf16", "f32", "q8_0", "q4_0", "iq4_nl")
TOKENS = (1, 2, 4, 8, 16, 32, 128, 512)
Floats = npt.NDArray[np.float32]


def dequantised(libraries: Libraries, backend: Backend, file: GGUFFile, name: str) -> Floats:
    """A matrix of the file, f32 [rows, columns]."""
    info = file.tensors[name]
    context = TensorContext(libraries, 2)
    kept = context.new_tensor(name, info.type, *info.shape)
    rows = context.new_tensor("rows", TensorType.I32, info.shape[1])
    buffer = allocate_tensors(libraries, backend.buffer_type, [kept, rows])
    set_data(libraries, kept, file.tensor_bytes(name))
    set_data(libraries, rows, np.arange(info.shape[1], dtype=np.int32))
    b = GraphBuilder(libraries, 4, 2)
    floats = b.output(b.get_rows(kept, rows), "floats")
    graph = Graph(b, [backend], "dequantise")
    graph.compute()
    values = get_array(libraries, floats)
    graph.free()
    context.free()
    buffer.free()
    return values


def encoded(libraries: Libraries, values: Floats, kind: TensorType) -> npt.NDArray[np.uint8]:
    """The bytes of a matrix in a type."""
    if kind is TensorType.F32:
        return values.view(np.uint8)
    n_rows, n_columns = values.shape
    raw = np.zeros(kind.tensor_bytes((n_columns, n_rows)), np.uint8)
    libraries.base.ggml_quantize_chunk(
        int(kind), ffi.from_buffer("float[]", values), ffi.from_buffer(raw, require_writable=True), 0, n_rows,
        n_columns, ffi.NULL,
    )  # fmt: skip
    return raw


def rearranging_type(libraries: Libraries, kind: TensorType, shape: tuple[int, ...]) -> object | None:
    """The buffer type that holds such a matrix rearranged, None where there is none."""
    cpu = cpu_device(libraries)
    for buffer_type in extra_buffer_types(libraries, cpu):
        b = GraphBuilder(libraries, 8)
        weight = b.new_tensor("weight", kind, *shape)
        empty = Buffer.allocate(libraries, buffer_type, 0)
        weight.ptr.buffer = empty.ptr
        works = supports_op(libraries, cpu, b.mul_mat(weight, b.new_tensor("x", TensorType.F32, shape[0], 512)))
        weight.ptr.buffer = ffi.NULL
        empty.free()
        b.free()
        if works:
            return buffer_type
    return None


class Layout:
    """The matrices in one layout, and its graphs."""

    def __init__(
        self, name: str, backend: Backend, file: GGUFFile, names: list[str], values: dict[str, Floats], n_threads: int
    ):
        libraries = backend.libraries
        self.n_threads = n_threads
        self.name, self.backend, self.libraries = name, backend, libraries
        self.context = TensorContext(libraries, len(names))
        self.weights: list[Tensor] = []
        self.buffers: list[Buffer] = []
        self.kinds: set[str] = set()
        for each in names:
            info = file.tensors[each]
            is_files = name in {"file", "panels"}
            kind = info.type if is_files else TensorType[name.upper()]
            tensor = self.context.new_tensor(each, kind, *info.shape)
            buffer_type = rearranging_type(libraries, kind, info.shape) or backend.buffer_type
            self.kinds.add(f"{kind.name} in {buffer_type_name(libraries, buffer_type)}")
            self.buffers.append(allocate_tensors(libraries, buffer_type, [tensor]))
            data = file.tensor_bytes(each) if is_files else encoded(libraries, values[each], kind)
            set_data(libraries, tensor, data)
            self.weights.append(tensor)

    @property
    def n_bytes(self) -> int:
        return sum(buffer.n_bytes for buffer in self.buffers)

    def graph(self, n_tokens: int) -> tuple[Graph, list[Tensor]]:
        b = GraphBuilder(self.libraries, 2 * len(self.weights) + 16, len(self.weights))
        widths = sorted({weight.ne[0] for weight in self.weights})
        inputs = {width: b.input(f"x_{width}", TensorType.F32, width, n_tokens) for width in widths}
        panels = find_joint_kernel(self.libraries) if self.name == "panels" else None
        for weight in self.weights:
            x = inputs[weight.ne[0]]
            lies_as_in_file = bool(self.libraries.base.ggml_backend_buffer_is_host(weight.ptr.buffer))
            if panels is not None and lies_as_in_file and panels.takes(weight.type, n_tokens):
                b.expand(b.joint_products(panels, x, [weight], self.n_threads)[0])
            else:
                b.expand(b.mul_mat(weight, x))
        graph = Graph(b, [self.backend], f"products in {self.name}")
        rng = np.random.default_rng(0)
        for tensor in inputs.values():
            set_data(self.libraries, tensor, rng.standard_normal((n_tokens, tensor.ne[0]), np.float32))
        return graph, list(inputs.values())


def measure(layouts: list[Layout], n_tokens: int, turns: int) -> dict[str, list[float]]:
    """Milliseconds of every turn by layout."""
    times: dict[str, list[float]] = {layout.name: [] for layout in layouts}
    with ExitStack() as undo:
        graphs = []
        for layout in layouts:
            graph, inputs = layout.graph(n_tokens)
            undo.callback(graph.free)
            graphs.append((layout, graph, inputs))
        for turn in range(turns + 1):
            for layout, graph, _ in graphs if turn % 2 else reversed(graphs):
                start = time.perf_counter()
                graph.compute()
                if turn:
                    times[layout.name].append(1000 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--layers", type=int, default=10**6)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    libraries = load()
    backend = Backend(libraries, cpu_device(libraries), options.threads)
    for model in options.models:
        file = GGUFFile.open(find_model(model))
        names = [
            name
            for name, info in file.tensors.items()
            if len(info.shape) == 2 and (layer := layer_of(name)) is not None and layer < options.layers
        ]
        values = {name: dequantised(libraries, backend, file, name) for name in names}
        layouts = [Layout(name, backend, file, names, values, options.threads) for name in options.layouts.split(",")]
        for layout in layouts:
            where = {"model": model, "layout": layout.name, "MiB": round(layout.n_bytes / 2**20, 1)}
            print(json.dumps({**where, "kinds": sorted(layout.kinds)}))
        for n_tokens in map(int, options.tokens.split(",")):
            times = measure(layouts, n_tokens, options.turns)
            for name, found in times.items():
                ratios = [base / own for base, own in zip(times["file"], found, strict=True)]
                row = {"model": model, "tokens": n_tokens, "layout": name, "ms": round(statistics.median(found), 2)}
                ratio = [round(each, 2) for each in (statistics.median(ratios), min(ratios), max(ratios))]
                print(json.dumps({**row, "faster_by": ratio[0], "spread": ratio[1:]}), flush=True)


if __name__ == "__main__":
    main()
