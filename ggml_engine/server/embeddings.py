"""POST /v1/embeddings, in OpenAI's form. Texts take turns with generations, one forward at a time.

So many requests are worked on at once (`embedding_turns`); the others wait, or are refused. One of many texts goes
behind those that wait whenever it holds no cells.
"""

from __future__ import annotations

import base64
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ggml_engine.control.embedding import Embedding
from ggml_engine.errors import EngineError
from ggml_engine.models.pooling import Pooling, choose_pooling
from ggml_engine.server.bodies import read_json
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.hosted_model import HostedModel
from ggml_engine.server.prompt_bytes import check_bytes
from ggml_engine.server.turns import Turns
from ggml_engine.server.validation import RequestModel, validated

MAX_TEXTS: Final = 2048


class Embeddings(RequestModel):
    """What OpenAI's endpoint takes, but for `dimensions`: a cut embedding of a model not made for it means nothing."""

    input: str | Annotated[list[Any], Field(min_length=1, max_length=MAX_TEXTS)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


async def embeddings(request: Request) -> Response:
    """One embedding of length 1 for each input."""
    values = await read_json(request)
    if values.get("dimensions", ...) is None:  # as some clients send what is not set
        del values["dimensions"]
    body = validated(Embeddings, values)
    async with request.state.host.use(body.model) as model:
        pooling = _pooling_of(model)
        inputs = _inputs(body.input)
        turns, partition = request.state.embedding_turns, request.state.partition
        encode = partial(_encoded, model, inputs)
        texts = await turns.run(partition, partial(request.state.embedding_workers.call, encode))
        n_tokens = sum(int(ids.size) for ids in texts)
        rows = await _computed(model, texts, pooling, turns, partition)
    request.state.metrics.on_tokens(model.name, prompt=n_tokens)
    shown = [_base64(row) if body.encoding_format == "base64" else row.tolist() for row in rows]
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(shown)]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": usage})


def _inputs(value: str | list[Any]) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if all(type(part) is int for part in value):
        return [value]
    if all(isinstance(part, str) or _are_tokens(part) for part in value):
        return list(value)
    raise HttpProblem(400, "invalid_value", "input is a text, texts, ids of tokens, or lists of those", "input")


def _are_tokens(part: object) -> bool:
    return isinstance(part, list) and bool(part) and all(type(token) is int for token in part)


def _encoded(model: HostedModel, inputs: list[str | list[int]]) -> list[Any]:
    vocabulary = model.engine.vocabulary
    for number, text in enumerate(inputs):
        if isinstance(text, str):
            check_bytes(model, text, model.engine.executor.max_positions, f"text {number}")
    return [
        vocabulary.encode(text, add_special=True, parse_special=False)
        if isinstance(text, str)
        else vocabulary.check_tokens(text)
        for text in inputs
    ]


def _pooling_of(model: HostedModel) -> Pooling:
    """How the model's file wants hidden states to be one embedding. Raises HttpProblem where it does not."""
    try:
        pooling = choose_pooling(model.engine.file, "auto")
    except EngineError:  # its message names a file of this machine
        pooling = "none"
    if pooling == "none":
        raise HttpProblem(
            400,
            "no_embeddings",
            f"the model {model.name!r} gives no embedding of a text: its file says that it ranks, or pools nothing",
            "model",
        )
    return pooling


async def _computed(model: HostedModel, texts: list[Any], pooling: Pooling, turns: Turns, partition: str) -> Any:
    """The rows, f32 [texts, n_embd]; a request that ends before leaves no cell behind.

    Where others wait, what was begun is finished, and then it waits behind them.
    """
    engine = model.engine
    work = Embedding(texts, pooling)
    work.check_length(engine.executor.max_positions)
    runner, is_left = engine.runner(), True
    try:
        while is_left:
            async with turns.turn(partition, goes_on=True):
                is_left = await runner.compute_async(work.step)
                while is_left and (work.is_begun or not turns.n_waiting):
                    is_left = await runner.compute_async(partial(work.step, begins=not turns.n_waiting))
    except BaseException:
        runner.compute_async(work.abandon)
        raise
    return work.result()


def _base64(row: Any) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
