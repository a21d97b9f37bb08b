"""What a server counts, for Prometheus: requests, tokens, times, and what its models hold at the moment of a scrape.

A registry of its own for every app. Gauges are read when they are asked for; nothing here waits for an engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.requests import Request
from starlette.responses import Response

from ggml_engine.server.hosting import ModelHost
from ggml_engine.server.lifecycle import Lifecycle
from ggml_engine.server.turns import Turns

_PREFIX: Final = "ggml_engine"
_FIRST_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_TOKENS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """See the module."""

    def __init__(self, host: ModelHost, lifecycle: Lifecycle, turns: Mapping[str, Turns]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            f"{_PREFIX}_requests",
            "Requests by route and status.",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self._tokens = Counter(
            f"{_PREFIX}_tokens",
            "Tokens of prompts (cached ones included), those of them that were cached, and generated ones.",
            ("model", "kind"),
            registry=self.registry,
        )
        self._first = Histogram(
            f"{_PREFIX}_time_to_first_token_seconds",
            "From a request to its first token.",
            ("model",),
            buckets=_FIRST_TOKEN_S,
            registry=self.registry,
        )
        self._between = Histogram(
            f"{_PREFIX}_inter_token_seconds",
            "Between two tokens of a choice.",
            ("model",),
            buckets=_BETWEEN_TOKENS_S,
            registry=self.registry,
        )
        self.registry.register(_Now(host, lifecycle, turns))

    def on_request(self, route: str, method: str, status: int, _seconds: float) -> None:
        """A response has ended."""
        self._requests.labels(route, method if method in METHODS else "other", str(status)).inc()

    def on_tokens(self, model: str, *, prompt: int = 0, cached: int = 0, generated: int = 0) -> None:
        """A reply has ended, with so many tokens. On any thread."""
        for kind, n in (("prompt", prompt), ("cached", cached), ("generated", generated)):
            if n:
                self._tokens.labels(model, kind).inc(n)

    def meter(self, model: str) -> ReplyMeter:
        """The times of one reply, from now on."""
        return ReplyMeter(self._first.labels(model), self._between.labels(model))


class ReplyMeter:
    """Times of one reply. `on_token` may be called on any thread, for one choice on one thread at a time."""

    def __init__(self, first: Any, between: Any) -> None:
        self._first = first
        self._between = between
        self._begun = time.monotonic()
        self._has_begun = False
        self._last: dict[int, float] = {}

    def on_token(self, choice: int, n: int = 1) -> None:
        """`n` tokens of a choice have come."""
        now = time.monotonic()
        if not self._has_begun:
            self._has_begun = True
            self._first.observe(now - self._begun)
        before = self._last.get(choice)
        if before is not None and n:
            self._between.observe((now - before) / n)
        self._last[choice] = now


# what a runtime's `stats()` has -> name and help of the gauge
_OF_RUNTIME: Final = {
    "waiting": ("queued_requests", "Requests that wait for their turn."),
    "running": ("active_requests", "Requests that compute."),
    "sessions": ("named_sessions", "Named sessions."),
    "cache_entries": ("snapshots", "Shared snapshots in the prefix cache."),
    "lanes_in_use": ("capture_lanes_used", "Capture lanes in use."),
    "lanes": ("capture_lanes", "Capture lanes."),
}
_OF_TURNS: Final = {
    "waiting": ("queued_calls", "Embeddings and tokenisations that wait for their turn."),
    "running": ("active_calls", "Embeddings and tokenisations that are worked on."),
}
_OF_EXECUTOR: Final = {
    "cells_used": ("cells_used", "Cells of K/V that are owned."),
    "cells_capacity": ("cells", "Cells of K/V."),
}


class _Now:
    """What is so at the moment of a scrape."""

    def __init__(self, host: ModelHost, lifecycle: Lifecycle, turns: Mapping[str, Turns]) -> None:
        self._host = host
        self._lifecycle = lifecycle
        self._turns = turns

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(
            f"{_PREFIX}_running_requests", "Requests whose endpoint runs.", self._lifecycle.n_running
        )
        yield GaugeMetricFamily(f"{_PREFIX}_models_loaded", "Models that are loaded.", len(self._host.loaded()))
        calls = {kind: {"waiting": turns.n_waiting, "running": turns.n_running} for kind, turns in self._turns.items()}
        yield from _gauges(_OF_TURNS, calls, "kind")
        loaded = self._host.loaded()
        yield from _gauges(_OF_RUNTIME, {model.name: model.runtime.stats() for model in loaded})
        yield from _gauges(_OF_EXECUTOR, {model.name: model.engine.executor.stats() for model in loaded})


def _gauges(
    table: Mapping[str, tuple[str, str]], stats: Mapping[str, Mapping[str, float]], label: str = "model"
) -> Iterator[GaugeMetricFamily]:
    for key, (name, text) in table.items():
        family = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=[label])
        for labelled, values in stats.items():
            if key in values:
                family.add_metric([labelled], values[key])
        yield family


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    return Response(generate_latest(request.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)
