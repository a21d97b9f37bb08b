"""Which route took a request. Older releases of Starlette name its endpoint alone."""

from __future__ import annotations

from typing import Final

from starlette.routing import Match, Route
from starlette.types import Scope

OTHER: Final = "other"


def route_of(scope: Scope) -> str:
    """The path of the route that a request was given to, as it was registered; "other" where it came to none."""
    if "endpoint" not in scope:
        return OTHER
    partial = OTHER
    for route in scope["app"].routes:
        if not isinstance(route, Route):
            continue
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route.path
        if match is Match.PARTIAL and partial == OTHER:  # it does not take the method
            partial = route.path
    return partial
