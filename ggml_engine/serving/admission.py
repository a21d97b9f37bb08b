"""`Admission`: which requests compute, and which wait for that.

Never more than `max_requests` choices compute, and whose turn it is begins as soon as all of its choices fit. What
waits is a `FairQueue`. Not locked: the runtime's lock is held around it.
"""

from __future__ import annotations

from ggml_engine.errors import QueueFullError
from ggml_engine.serving.durations import Durations
from ggml_engine.serving.job import Job
from ggml_engine.serving.options import ServingOptions
from ggml_engine.serving.request import ServingRequest
from ggml_engine.serving.waiting import FairQueue


class Admission:
    """The jobs of a runtime between their submission and their end. `n_running` choices compute now."""

    def __init__(self, options: ServingOptions) -> None:
        self._most_running = options.max_requests
        self._waiting: FairQueue[Job] = FairQueue(options.max_queue)
        self._begun_at: dict[Job, float] = {}
        self._durations = Durations()
        self.n_running = 0

    @property
    def n_waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def _fits(self, n: int) -> bool:
        return self.n_running + n <= self._most_running

    def refusal(self, request: ServingRequest) -> QueueFullError | None:
        """What a request is refused with that would have to wait where there is no room; None where it is taken."""
        must_wait = bool(self._waiting) or not self._fits(request.n)
        if not must_wait or self._waiting.has_room(request.partition):
            return None
        n = self.n_waiting
        return QueueFullError(n, self._durations.retry_after_s(n, self._most_running))

    def put(self, job: Job) -> None:
        """It waits for its turn."""
        self._waiting.put(job.request.partition, job)

    def take(self, now: float) -> Job | None:
        """The job whose turn it is, which computes from here on; None where nothing waits, or it does not fit."""
        job = self._waiting.first()
        if job is None or not self._fits(job.request.n):
            return None
        self._waiting.take()
        self.n_running += job.request.n
        self._begun_at[job] = now
        return job

    def end(self, job: Job, now: float) -> None:
        """It has ended, wherever it was; once."""
        begun_at = self._begun_at.pop(job, None)
        if begun_at is None:
            self._waiting.remove(job.request.partition, job)
        else:
            self.n_running -= job.request.n
            self._durations.note(now - begun_at)
