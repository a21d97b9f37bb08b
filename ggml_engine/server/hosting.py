"""`ModelHost`: the models of a server. Loaded when they are asked for, within a budget of memory, unloaded when idle.

A model is loaded once however many ask for it, in a worker thread; a load that nobody waits for any more is cancelled.
A model in use, or waited for, is never unloaded. All state belongs to the event loop's thread; what takes long runs in
threads of the host's own. What a model is, and how it comes to be loaded, is in `hosted_model.py`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from starlette.requests import Request

from ggml_engine.control.machine_memory import give_back
from ggml_engine.errors import CancelledError, EngineError, OptionError
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.hosted_model import LOAD_ERRORS, HostedModel, Loader, gib
from ggml_engine.server.logs import log, log_bug
from ggml_engine.server.workers import Workers

CLOSE_S: Final = 2.0  # for one model to end its work
_RETRY_S: Final = 5.0
_MAX_NAMED: Final = 8  # models in a message


@dataclass(eq=False)
class _Slot:
    """A name, and what there is of its model."""

    name: str
    path: str
    model: HostedModel | None = None
    loading: asyncio.Task[None] | None = None
    closing: asyncio.Task[bool] | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    n_users: int = 0
    n_bytes: int = 0  # reserved from the beginning of a load to the end of the unloading
    last_used: float = 0.0


class ModelHost:
    """See the module. `budget` None is no bound; `idle_s` None keeps models until another needs their room.

    With `any_model` the default model answers to every name that is no other's. `failure` is why the last load failed.
    """

    def __init__(
        self,
        models: Sequence[tuple[str, str]],
        loader: Loader,
        *,
        budget: int | None = None,
        idle_s: float | None = None,
        any_model: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = {name: _Slot(name, path) for name, path in models}
        self._loader = loader
        self._budget = budget
        self._idle_s = idle_s
        self._any_model = any_model
        self._clock = clock
        self._admission = asyncio.Lock()
        self._threads = Workers(len(self._slots) + 2, "ggml-engine-models")
        self._unended: list[tuple[HostedModel, int]] = []  # unloaded, but still at work: their bytes are not free yet
        self._is_closed = False
        self.n_loads = 0
        self.failure: HttpProblem | None = None

    @property
    def names(self) -> list[str]:
        """All models, the default one first."""
        return list(self._slots)

    @property
    def default(self) -> str:
        """The model of a request that names none."""
        return next(iter(self._slots))

    def named(self, name: str | None) -> str:
        """The model that a request's name stands for. Raises HttpProblem 404."""
        if name is None or (self._any_model and name not in self._slots):
            return self.default
        if name not in self._slots:
            there = ", ".join(self.names[:_MAX_NAMED]) + (", ..." if len(self._slots) > _MAX_NAMED else "")
            why = f"there is no model {name!r:.140}, only {there}; the server's option any_model has the first of them"
            raise HttpProblem(404, "model_not_found", f"{why} answer to every name", "model")
        return name

    def loaded(self) -> list[HostedModel]:
        """Those that are loaded now."""
        return [slot.model for slot in self._slots.values() if slot.model is not None]

    def is_loading(self, name: str) -> bool:
        """Whether it is being loaded."""
        slot = self._slots[name]
        return slot.model is None and slot.loading is not None

    def check_sizes(self) -> None:
        """Raise OptionError for a model that the budget can never hold, with its sizes. Reads files."""
        if self._budget is None:
            return
        for slot in self._slots.values():
            size = self._loader.measure(slot.path)
            if size.total > self._budget:
                raise OptionError(
                    f"memory_budget={self._budget} ({gib(self._budget)}) cannot hold the model {slot.name!r}, which "
                    f"takes {size}; a smaller ctx takes less K/V"
                )

    @asynccontextmanager
    async def use(self, name: str | None = None) -> AsyncIterator[HostedModel]:
        """The model of a name, loaded where it is not, and kept while the block runs. Raises HttpProblem."""
        slot = self._slots[self.named(name)]
        slot.n_users += 1
        try:
            yield await self._ready(slot)
        finally:
            slot.n_users -= 1
            slot.last_used = self._clock()
            if not slot.n_users and slot.loading is not None:
                slot.cancel.set()  # nobody waits for it any more

    # ---- loading

    async def _ready(self, slot: _Slot) -> HostedModel:
        while slot.model is None:
            if self._is_closed:
                raise HttpProblem(503, "shutting_down", "the server is shutting down")
            if slot.loading is None:
                slot.cancel = threading.Event()
                slot.loading = asyncio.create_task(self._load(slot))
            task, was_cancelled = slot.loading, slot.cancel.is_set()
            if was_cancelled:  # by those who waited before; it ends, and begins anew
                await asyncio.wait({task})
            else:
                await asyncio.shield(task)
        return slot.model

    async def _load(self, slot: _Slot) -> None:
        try:
            await self._admit(slot)
            try:
                log.info("loading the model %s", slot.name)
                slot.model = await self._threads.call(
                    lambda: self._loader.load(slot.name, slot.path, slot.cancel.is_set)
                )
                self.n_loads += 1
                self.failure = None
                slot.last_used = self._clock()
            except BaseException:
                slot.n_bytes = 0
                raise
        except CancelledError as error:
            raise HttpProblem(
                503, "load_cancelled", "the loading of the model was cancelled", retry_after_s=1
            ) from error
        except HttpProblem as problem:
            self.failure = problem
            raise
        except LOAD_ERRORS as error:
            log.error("the model %s cannot be loaded: %s", slot.name, error)
            raise self._failed(slot, "") from error
        except Exception as error:
            log_bug(error, f"the loading of {slot.name} failed")
            raise self._failed(slot, f" ({type(error).__name__})") from error
        finally:
            slot.loading = None

    def _failed(self, slot: _Slot, why: str) -> HttpProblem:
        """What callers are told: an error's own message names files of this machine."""
        told = f"the model {slot.name!r} could not be loaded{why}; the server's log says why"
        self.failure = HttpProblem(500, "model_load_failed", told)
        return self.failure

    async def _admit(self, slot: _Slot) -> None:
        """Reserve what the model may take, unloading idle ones, least recently used first. Raises HttpProblem."""
        async with self._admission:
            if slot.closing is not None:
                await asyncio.wait({slot.closing})
            if self._budget is None:
                return
            size = await self._threads.call(lambda: self._loader.measure(slot.path))
            if size.total > self._budget:
                raise HttpProblem(
                    400,
                    "model_too_large",
                    f"the model {slot.name!r} takes {size}, the memory budget is {gib(self._budget)}",
                    "model",
                )
            await self._end_rest()
            while self._n_reserved() + size.total > self._budget:
                idle = [other for other in self._slots.values() if other.model is not None and not other.n_users]
                if not idle:
                    raise HttpProblem(
                        503,
                        "model_busy",
                        f"the model {slot.name!r} takes {size}, and models in use leave too little of the "
                        f"memory budget of {gib(self._budget)}",
                        retry_after_s=_RETRY_S,
                    )
                await self._unload(min(idle, key=lambda other: other.last_used))
            slot.n_bytes = size.total

    # ---- unloading

    async def _unload(self, slot: _Slot) -> None:
        model, slot.model = slot.model, None
        if model is not None:
            log.info("unloading the model %s", slot.name)
            slot.closing = asyncio.create_task(self._close(slot, model))
            del model
            await asyncio.shield(slot.closing)
            await self._threads.call(give_back)

    def _n_reserved(self) -> int:
        return sum(slot.n_bytes for slot in self._slots.values()) + sum(n_bytes for _, n_bytes in self._unended)

    async def _close(self, slot: _Slot, model: HostedModel, timeout: float = CLOSE_S) -> bool:
        """Whether all of it was freed; what was not is tried again by `_end_rest`."""
        is_whole = False
        try:
            is_whole = await self._freed(model, timeout)
        finally:
            if not is_whole:
                self._unended.append((model, slot.n_bytes))
            slot.n_bytes = 0
            slot.closing = None
        return is_whole

    async def _end_rest(self) -> None:
        """Close once more what was still at work when it was unloaded."""
        for rest in list(self._unended):
            if await self._freed(rest[0], 0.0) and rest in self._unended:
                self._unended.remove(rest)

    async def _freed(self, model: HostedModel, timeout: float) -> bool:
        """Close it; whether all was freed."""
        try:
            return await self._threads.call(partial(model.close, timeout))
        except EngineError as error:
            log.error("the model %s is not freed: %s", model.name, error)
            return False

    async def unload_idle(self) -> None:
        """Unload what nobody has used for `idle_s`."""
        async with self._admission:
            await self._end_rest()
        if self._idle_s is None:
            return
        now = self._clock()
        for slot in self._slots.values():
            if slot.model is not None and not slot.n_users and now - slot.last_used >= self._idle_s:
                await self._unload(slot)

    async def watch_idle(self) -> None:
        """Call `unload_idle` from time to time, for ever."""
        while self._idle_s is not None:
            await asyncio.sleep(min(5.0, self._idle_s / 4))
            try:
                await self.unload_idle()
            except EngineError as error:
                log.error("a model could not be unloaded: %s", error)

    async def close(self, timeout: float = CLOSE_S) -> bool:
        """End everything; False when something still runs after `timeout` seconds."""
        until = time.monotonic() + timeout
        self._is_closed = True
        tasks: set[asyncio.Future[Any]] = set()
        for slot in self._slots.values():
            slot.cancel.set()
            if slot.loading is not None:
                tasks.add(slot.loading)
            if slot.closing is not None:
                tasks.add(slot.closing)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout / 2)
        closings = []
        for slot in self._slots.values():
            model, slot.model = slot.model, None
            if model is not None:
                closings.append(asyncio.create_task(self._close(slot, model, max(0.0, until - time.monotonic()))))
        if closings:
            await asyncio.wait(closings, timeout=max(0.0, until - time.monotonic()))
        if self._unended:
            await asyncio.wait({asyncio.create_task(self._end_rest())}, timeout=max(0.0, until - time.monotonic()))
        is_whole = all(task.done() for task in (*tasks, *closings)) and not self._unended
        self._threads.close()
        return is_whole


async def use_model(request: Request, name: str | None = None) -> HostedModel:
    """`ModelHost.use` until the response of a request has been sent, its stream included."""
    host: ModelHost = request.state.host
    model: HostedModel = await request.state.stack.enter_async_context(host.use(name))
    return model
