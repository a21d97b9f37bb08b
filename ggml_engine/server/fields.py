"""Fields of a request's body, read by pydantic: one that there is not, or of a wrong type, is a 400 that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ggml_engine.server.errors import HttpProblem


class Fields(BaseModel):
    """Base of the bodies: strict types, and no field that is not named."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


Body = TypeVar("Body", bound=BaseModel)


def read_fields(kind: type[Body], values: Mapping[str, Any]) -> Body:
    """A body of that kind. Raises HttpProblem 400."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise problem_of_fields(error) from None


def problem_of_fields(error: ValidationError) -> HttpProblem:
    """The first fault, with the path of its field; a field that there is not is an `unsupported_parameter`."""
    first = error.errors(include_input=False, include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")[:200]
    if first["type"] == "extra_forbidden":
        return HttpProblem(400, "unsupported_parameter", f"{path} is not supported here", path)
    if first["type"] == "missing":
        return HttpProblem(400, "missing_required_parameter", f"{path} is missing", path)
    return HttpProblem(400, "invalid_value", f"{path}: {first['msg']}", path)
