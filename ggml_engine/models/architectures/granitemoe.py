"""`granitemoe`: Granite 3 and 4 with experts, shared ones beside them in some.

As `granite`, always rotating. IBM 2024, github.com/ibm-granite/granite-3.0-language-models; llama.cpp's
src/models/granite-moe.cpp.
"""

from __future__ import annotations

from ggml_engine.models.architecture import Architecture
from ggml_engine.models.architectures.granite import graph, read_scaled, tensors

ARCHITECTURE = Architecture("granitemoe", read_scaled, tensors, graph)
