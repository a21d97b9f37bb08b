"""POST /tokenize and POST /detokenize, in the forms of llama.cpp's server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ggml_engine.server.bodies import read_json
from ggml_engine.server.validation import Many, RequestModel, validated

_PART: Final = 4096  # tokens that are written as JSON at once

Result = TypeVar("Result")


class Tokenize(RequestModel):
    """A text, and how it is read."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    model: str | None = None


class Detokenize(RequestModel):
    """Ids of tokens."""

    tokens: Many[int] = Field(max_length=1 << 20)
    model: str | None = None


async def in_turn(request: Request, function: Callable[[], Result]) -> Result:
    """What it makes of a text, in its caller's turn, on a thread for texts alone. Raises QueueFullError."""
    work = partial(request.state.token_workers.call, function)
    made: Result = await request.state.token_turns.run(request.state.partition, work)
    return made


async def tokenize(request: Request) -> Response:
    """`{"tokens": [id, ...]}`, or with pieces `[{"id", "piece"}]`; a piece that is no UTF-8 is a list of its bytes."""
    body = validated(Tokenize, await read_json(request))
    async with request.state.host.use(body.model) as model:
        written = await in_turn(request, partial(_written, model.engine.vocabulary, body))
    return Response(written, media_type="application/json")


def _written(vocabulary: Any, body: Tokenize) -> bytes:
    """The answer. JSON holds Python's lock while it is written, so a part is written at a time."""
    found = _tokenized(vocabulary, body)
    parts = [json.dumps(found[start : start + _PART])[1:-1] for start in range(0, len(found), _PART)]
    return ('{"tokens":[' + ",".join(parts) + "]}").encode()


def _tokenized(vocabulary: Any, body: Tokenize) -> list[Any]:
    ids = vocabulary.encode(body.content, add_special=body.add_special, parse_special=body.parse_special).tolist()
    if not body.with_pieces:
        return list(ids)
    names = _control_texts(vocabulary)
    return [{"id": token, "piece": _piece(vocabulary, names, token)} for token in ids]


def _piece(vocabulary: Any, names: dict[int, str], token: int) -> str | list[int]:
    if token in names:
        return names[token]
    piece: bytes = vocabulary.piece(token)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: Request) -> Response:
    """`{"content": text}`; control tokens are spelled out, as `tokenize` reads them."""
    body = validated(Detokenize, await read_json(request))
    async with request.state.host.use(body.model) as model:
        text = await in_turn(request, partial(_text, model.engine.vocabulary, body.tokens))
    return JSONResponse({"content": text})


def _text(vocabulary: Any, tokens: Sequence[int]) -> str:
    ids = vocabulary.check_tokens(tokens).tolist()
    names = _control_texts(vocabulary)
    parts: list[str] = []
    run: list[int] = []
    for token in ids:
        if token not in names:
            run.append(token)
            continue
        parts += [vocabulary.decode(run, continues=bool(parts)), names[token]]
        run = []
    parts.append(vocabulary.decode(run, continues=bool(parts)))
    return "".join(parts)


def _control_texts(vocabulary: Any) -> dict[int, str]:
    return {token: text for text, token in vocabulary.special_tokens.items()}
