"""`Shared`: what all requests of a runtime work with."""

from __future__ import annotations

from dataclasses import dataclass

from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.runner import Runner
from ggml_engine.serving.checkpoints import Post
from ggml_engine.serving.lanes import LanePool
from ggml_engine.serving.options import ServingOptions


@dataclass(frozen=True, slots=True)
class Shared:
    """The runner, what is cached over it, and how the control thread is given a next step."""

    runner: Runner
    options: ServingOptions
    cache: PrefixCache
    lanes: LanePool
    post: Post
