"""Runs mutants of a model in children of a child: what the loader accepts must end by itself, never by a signal.

    python mutant_child.py MODEL.gguf FOLDER N_ACCEPTED SEED [libllama]

Each mutant has its own forked process, which opens, loads, prefills 8 tokens and decodes 2, within a time and an address
space, by our graphs or in libllama's context. Prints one line of JSON: how many were tried, refused, run to their end or to a typed error, and those that were not.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from forged_models import taken_apart
from gguf_forge import Field, Image

from ggml_engine.errors import EngineError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.llama import LlamaExecutor
from ggml_engine.executor.llama_options import LlamaOptions
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml import library
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.llama_model import LlamaModel
from ggml_engine.ggml.vocab_tables import read_tables
from ggml_engine.models.model import load_model

REFUSED, RAN, FAILED_TYPED, UNTYPED = 10, 0, 11, 12
N_PREFILL, N_DECODE = 8, 2
SECONDS = 20
ADDRESS_BYTES = 8 << 30
HOSTILE = [0, 1, 2, 3, 5, 7, 8, 16, 31, 32, 33, 63, 64, 65, 95, 127, 128, 255, 256, 513, 2**15, 2**16, 2**31 - 1, 2**31,
           2**32 - 1, 2**63, 2**64 - 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x80000000, 0x00000001, 0x7F7FFFFF]  # fmt: skip


def mutate(image: Image, semantic: list[Field], rng: random.Random) -> bytes:
    """One to three changes: a hostile number, a bit, bytes of the header, or of the weights."""
    data = bytearray(image.data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        which = rng.random()
        if which < 0.55:
            field = rng.choice(semantic)
            value = rng.choice((*HOSTILE, rng.getrandbits(32)))
            data[field.offset : field.offset + field.width] = (value % 256**field.width).to_bytes(field.width, "little")
        elif which < 0.7:
            field = rng.choice(semantic)
            data[field.offset + rng.randrange(field.width)] ^= 1 << rng.randrange(8)
        elif which < 0.8:
            data[rng.randrange(image.header_bytes)] = rng.randrange(256)
        else:
            at = rng.randrange(image.header_bytes, len(data) - 4)
            data[at : at + 4] = rng.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", rng.randbytes(4), b"\xff" * 4))
    return bytes(data)


def run_one(path: Path) -> int:
    """The exit code of one mutant."""
    try:
        file = GGUFFile.open(path)
        model = load_model(file, threads=1)
    except EngineError:
        return REFUSED
    try:
        form = ("matmul", "flash")[path.stat().st_size % 2 ^ model.hp.n_layer % 2]
        executor = GgmlExecutor(model, ExecutorOptions(capacity=64, run=4, read_block=8, attention=form))  # type: ignore[arg-type]
        sequence = executor.open()
        tokens = [i * 37 % model.hp.n_vocab for i in range(N_PREFILL + N_DECODE)]
        executor.forward(Batch.of_sequence(sequence, tokens[:N_PREFILL], logits="all"))
        for token in tokens[N_PREFILL:]:
            executor.forward(Batch.of_sequence(sequence, [token]))
        executor.close_all()
        model.free()
        file.close()
    except EngineError:
        return FAILED_TYPED
    return RAN


def run_one_in_libllama(path: Path) -> int:
    """The same, where libllama loads the file that we looked at."""
    try:
        file = GGUFFile.open(path)
        read_tables(file)  # as `Engine.load` does first
        model = LlamaModel.load(file, device="cpu")
    except EngineError:
        return REFUSED
    try:
        executor = LlamaExecutor(model, LlamaOptions(capacity=64, threads=1))
        sequence = executor.open()
        tokens = [i * 37 % model.n_vocab for i in range(N_PREFILL + N_DECODE)]
        executor.forward(Batch.of_sequence(sequence, tokens[:N_PREFILL], logits="all"))
        for token in tokens[N_PREFILL:]:
            executor.forward(Batch.of_sequence(sequence, [token]))
        executor.close_all()
        model.free()
        file.close()
    except EngineError:
        return FAILED_TYPED
    return RAN


def fork_one(path: Path, run: Callable[[Path], int] | None = None) -> int:
    """The wait status of a forked `run`, which is `run_one` by default."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    code = UNTYPED
    try:
        code = (run or run_one)(path)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(model: str, folder: str, n_accepted: str, seed: str, engine: str = "") -> None:
    global run_one  # noqa: PLW0603  # a child has one
    if engine == "libllama":
        run_one = run_one_in_libllama
    library.load()  # opened once, here: nothing has run on it when the children are made
    image = taken_apart(Path(model)).build()
    semantic = [field for field in image.fields if not field.name.startswith("kv.tokenizer")]
    rng = random.Random(int(seed))
    counts = {"tried": 0, "refused": 0, "ran": 0, "typed": 0}
    bad: list[str] = []
    while counts["ran"] + counts["typed"] + len(bad) < int(n_accepted) and counts["tried"] < 40 * int(n_accepted):
        path = Path(folder) / f"mutant-{counts['tried']}.gguf"
        path.write_bytes(mutate(image, semantic, rng))
        status = fork_one(path)
        counts["tried"] += 1
        outcome = {REFUSED: "refused", RAN: "ran", FAILED_TYPED: "typed"}.get(
            os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
        )
        if outcome is None:
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
            bad.append(f"{path}: {how}")
            continue  # the file stays, to be looked at
        counts[outcome] += 1
        path.unlink()
    sys.stdout.write(json.dumps({**counts, "bad": bad}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
