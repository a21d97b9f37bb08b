"""Several weights times the same activations, as one operation."""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.joint_kernel import MOST_WEIGHTS, JointKernel
from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.ops.shapes import ShapeOps
from ggml_engine.ggml.ops.tensors import Tensor, require
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.ggml.threads import MAX_THREADS

_ALL_TASKS = -1  # GGML_N_TASKS_MAX: as many as there are threads


class JointOps(ShapeOps):
    """The compiled joint products as an operation."""

    def joint_products(
        self,
        kernel: JointKernel,
        x: Tensor,
        weights: Sequence[Tensor],
        n_threads: int,
        *,
        norm: tuple[Tensor, float] | None = None,
        added: Tensor | None = None,
        names: Sequence[str] = (),
    ) -> list[Tensor]:
        """Each weight [k, rows] times x f32 [k, tokens]: f32 [rows, tokens], views that lie one after the other.

        The same numbers as `mul_mat` of each with x; on a CPU only, over weights as the file has them. With `norm`, a
        weight f32 [k] and an eps, x is RMS-normed and multiplied with it first. `added` f32 [rows, tokens] is added to
        the product of the only weight. `names` are the products'. At most `n_threads` work at once.
        """
        what = "joint_products"
        given = (x, *weights)
        n_dims, n_tokens = x.ne[:2]
        require(1 <= len(weights) <= MOST_WEIGHTS, what, f"1 to {MOST_WEIGHTS} weights", *given)
        require(x.type == TensorType.F32 and x.has_contiguous_rows, what, "x must be f32 with whole rows", *given)
        require(x.ne[2:] == (1, 1), what, "x must be a matrix", *given)
        for weight in weights:
            require(weight.ne[0] == n_dims and weight.ne[2:] == (1, 1), what, "row lengths differ", *given)
            require(weight.has_contiguous_rows, what, "rows of weights must be contiguous", *given)
            require(kernel.takes(weight.type, n_tokens), what, f"not of {n_tokens} tokens in this type", weight)
        require(1 <= n_threads <= MAX_THREADS, what, f"{n_threads} threads", *given)
        if norm is not None:
            fits = norm[0].type == TensorType.F32 and norm[0].ne == (n_dims, 1, 1, 1) and norm[0].is_contiguous
            require(fits and norm[1] >= 0, what, "the norm's weight must be as long as a row of x", x, norm[0])
        n_rows = sum(weight.ne[1] for weight in weights)
        if added is not None:
            fits = added.type == TensorType.F32 and added.ne == (n_rows, n_tokens, 1, 1) and added.has_contiguous_rows
            require(fits and len(weights) == 1, what, "what is added must be as the product", *given, added)
        params, n_scratch = kernel.params(
            [weight.type for weight in weights], n_dims, n_tokens, n_threads,
            eps=None if norm is None else norm[1], adds=added is not None,
        )  # fmt: skip
        self.kept.append(params)
        sources = [x, *weights, *([] if norm is None else [norm[0]]), *([] if added is None else [added])]
        ctx = self._room(what, *sources)
        pointers = ffi.new("struct ggml_tensor *[]", [source.ptr for source in sources])
        ptr = self.base.ggml_custom_4d(
            ctx, int(TensorType.F32), n_rows * n_tokens + n_scratch, 1, 1, 1, pointers, len(sources), kernel.operation,
            _ALL_TASKS, params,
        )  # fmt: skip
        names = names or [""] * len(weights)
        held = self._named(ptr, f"{names[0]}.held")
        views = []
        first = 0
        for weight, name in zip(weights, names, strict=True):
            views.append(self.view(held, (weight.ne[1], n_tokens), (4 * n_rows,), 4 * first, name))
            first += weight.ne[1]
        return views
