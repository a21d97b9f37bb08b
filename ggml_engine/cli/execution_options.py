"""The options of loading and executing a model, which become the keywords of `Engine.load`.

Names and defaults are those of its signature: a test compares them, since reading it here would load native code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import click

from ggml_engine.cli.sections import Decorated, option, together

EXECUTION: Final = "Model and execution"

KV_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q4_0")
CACHE_KINDS: Final = ("batched_cell", "sequence")
ENGINES: Final = ("auto", "native", "llama")
ATTENTION_FORMS: Final = ("auto", "cells", "flash", "flash_folded", "matmul", "matmul_folded")
PREFILL_LAYOUTS: Final = ("off", "f16", "bf16", "f32", "q8_0")
MAX_THREADS: Final = 512


def threads_option(section: str) -> Callable[[Decorated], Decorated]:
    """--threads, which every command that computes has."""
    return option(
        "--threads",
        section=section,
        type=click.IntRange(1, MAX_THREADS),
        metavar="N",
        show_default="the physical, fast cores that this process may use",
        help="Threads that compute.",
    )


execution_options = together(
    option(
        "--engine",
        section=EXECUTION,
        type=click.Choice(ENGINES),
        default="auto",
        show_default=True,
        help="Our graphs, or libllama's own context; auto is native where there is a graph for the model.",
    ),
    option(
        "--ctx",
        section=EXECUTION,
        type=click.IntRange(min=1),
        metavar="N",
        show_default="the model's own, within half of the free memory",
        help="Capacity in cells: tokens of K/V.",
    ),
    threads_option(EXECUTION),
    option(
        "--threads-batch",
        section=EXECUTION,
        type=click.IntRange(1, MAX_THREADS),
        metavar="N",
        show_default="as --threads",
        help="Threads that compute steps of more than one token.",
    ),
    option(
        "--leave-cores",
        section=EXECUTION,
        type=click.IntRange(0, MAX_THREADS),
        metavar="N",
        default=0,
        show_default=True,
        help="Cores to leave to others: lowers the default of --threads, at least to 1.",
    ),
    option(
        "--kv-type",
        section=EXECUTION,
        type=click.Choice(KV_TYPES),
        default="f16",
        show_default=True,
        help="Number type of K and V.",
    ),
    option(
        "--cache-kind",
        section=EXECUTION,
        type=click.Choice(CACHE_KINDS),
        default="batched_cell",
        show_default=True,
        help="batched_cell holds K and V of many sequences, which may share them; sequence of one.",
    ),
    option(
        "--attention",
        section=EXECUTION,
        type=click.Choice(ATTENTION_FORMS),
        default="auto",
        show_default=True,
        help="How attention is computed; auto takes what is fast on the device.",
    ),
    option(
        "--device",
        section=EXECUTION,
        metavar="NAME",
        default="auto",
        show_default=True,
        help="auto, cpu, metal, or a name that `ggml-engine devices` shows.",
    ),
    option(
        "--gpu-layers",
        section=EXECUTION,
        type=click.IntRange(min=0),
        metavar="N",
        show_default="all, where the device is no CPU",
        help="Layers on the device, from the end; the output is one more.",
    ),
    option(
        "--mmap/--no-mmap",
        section=EXECUTION,
        default=True,
        show_default=True,
        help="Map the file, or copy it first (for files that may change meanwhile).",
    ),
    option(
        "--batch-tokens",
        "--max-batch-tokens",
        "max_batch_tokens",
        section=EXECUTION,
        type=click.IntRange(min=1),
        metavar="N",
        default=512,
        show_default=True,
        help="Most tokens in one step of reading a prompt.",
    ),
    option(
        "--deterministic/--no-deterministic",
        section=EXECUTION,
        default=False,
        show_default=True,
        help="The same bits however the tokens are cut into steps; slower.",
    ),
    option(
        "--prefill-weights",
        section=EXECUTION,
        type=click.Choice(PREFILL_LAYOUTS),
        default="off",
        show_default=True,
        help="Quantised weights a second time, as this type, for steps of 8 tokens and more: faster, in more memory.",
    ),
    option(
        "--calibrate/--no-calibrate",
        section=EXECUTION,
        default=False,
        show_default=True,
        help="Let --attention auto choose by times measured on this machine, once, while there is nothing to do.",
    ),
    option(
        "--lora",
        "adapters",
        section=EXECUTION,
        multiple=True,
        callback=lambda _ctx, _param, values: tuple(map(_scaled_adapter, values)),
        metavar="FILE[:SCALE]",
        help="GGUF adapter (LoRA), and how strongly it acts (1 where not given); may be repeated.",
    ),
)
LOAD_OPTIONS: Final = (
    "engine", "ctx", "threads", "threads_batch", "leave_cores", "device", "gpu_layers", "mmap", "kv_type", "cache_kind",
    "attention", "max_batch_tokens", "deterministic", "adapters", "prefill_weights",
    "calibrate",
)  # fmt: skip


def _scaled_adapter(text: str) -> tuple[str, float]:
    """File and scale; a colon that is part of the name of a file that is there is no scale."""
    path, colon, after = text.rpartition(":")
    if not colon or os.path.exists(text):
        return text, 1.0
    try:
        scale = float(after)
    except ValueError:
        return text, 1.0
    if not path or not math.isfinite(scale):
        raise click.BadParameter(f"{text!r} is no file, and no FILE:SCALE")
    return path, scale


def load_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `Engine.load` among a command's values."""
    return {name: values[name] for name in LOAD_OPTIONS}
