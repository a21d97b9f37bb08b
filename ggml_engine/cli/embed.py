"""`ggml-engine embed`: embeddings of texts, one JSON object a line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import click

from ggml_engine.cli import output, text_input
from ggml_engine.cli.boundary import debug_option
from ggml_engine.cli.execution_options import ENGINES, EXECUTION, threads_option
from ggml_engine.cli.sections import SectionedCommand, option

if TYPE_CHECKING:
    from ggml_engine.engine import Engine
    from ggml_engine.executor.encoder import Encoder

POOLINGS: Final = ("auto", "mean", "last", "cls", "none")
_EMBEDDING: Final = "Embedding"


@click.command(cls=SectionedCommand, short_help="Embed texts.")
@click.argument("model")
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@option(
    "--pooling",
    section=_EMBEDDING,
    type=click.Choice(POOLINGS),
    default="auto",
    show_default=True,
    help="What is made of the tokens' states; auto is what the file says, else the mean; none keeps all.",
)
@option(
    "--normalize/--no-normalize",
    section=_EMBEDDING,
    default=True,
    show_default=True,
    help="Rows of length 1.",
)
@option(
    "--engine",
    section=EXECUTION,
    type=click.Choice(ENGINES),
    default="auto",
    show_default=True,
    help="What computes decoders; encoders are computed by libllama.",
)
@threads_option(EXECUTION)
@debug_option
def embed(model: str, texts: tuple[str, ...], pooling: Any, normalize: bool, engine: Any, threads: int | None) -> None:
    """Write MODEL's embeddings of every TEXT to stdout, one JSON object a line: index and embedding.

    MODEL is a GGUF file of a decoder or an encoder, or a known name: smollm2, gemma3-270m. With --pooling none an
    embedding is a list of one for every token.
    """
    wanted = [text_input.from_argument(text) for text in texts]
    with load_embedder(model, engine, threads) as embedder:
        found = embedder.embed(wanted, pooling, normalize=normalize)
    stream = output.TextOutput()
    for index, embedding in enumerate(found):
        stream.write(json.dumps({"index": index, "embedding": embedding.tolist()}) + "\n")


def load_embedder(model: str, engine: Any, threads: int | None) -> Engine | Encoder:
    """An `Encoder` where the file holds one, else an `Engine`; imports native code only now."""
    from ggml_engine.engine import Engine  # noqa: PLC0415
    from ggml_engine.executor.encoder import Encoder  # noqa: PLC0415
    from ggml_engine.ggml.gguf import GGUFFile  # noqa: PLC0415
    from ggml_engine.ggml.llama_architectures import is_encoder  # noqa: PLC0415
    from ggml_engine.known_models import find_model  # noqa: PLC0415

    path = find_model(model)
    with GGUFFile.open(path) as file:
        reads_whole_texts = is_encoder(file)
    if reads_whole_texts:
        return Encoder.load(path, threads=threads)
    return Engine.load(path, engine=engine, threads=threads)
