from typing import Final

PARAMS_BYTES: Final[int]
TENSOR_BYTES: Final[int]

def kernel() -> tuple[str, int, int, int] | None: ...
def scratch_floats(n_slices: int, n_queries: int, n_dims: int, n_dims_v: int) -> int: ...
