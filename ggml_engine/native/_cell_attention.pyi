from typing import Final

PARAMS_BYTES: Final[int]
TENSOR_BYTES: Final[int]

def kernel() -> tuple[str, int, int, int] | None: ...
