"""`Run`: a prepared job over a serving runtime, told as events.

What is new comes on the engine's threads and is only noted there; reading it (markup, probabilities as text) and all
that follows belongs to the event loop's thread. A choice ends as it did: what failed, or was shut down, is a `Failed`,
and never the end of an answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from ggml_engine.chat.replies import ContentPart, ToolCallEnd
from ggml_engine.control.generation import Reason, Update
from ggml_engine.server.choice_reader import ChoiceReader
from ggml_engine.server.errors import HttpProblem, internal_error, problem_of
from ggml_engine.server.events import (
    Begun,
    Ended,
    Event,
    Failed,
    Finished,
    Progress,
    Said,
    StopReason,
    Usage,
)
from ggml_engine.server.hosted_model import HostedModel
from ggml_engine.server.jobs import GenerationJob
from ggml_engine.server.logs import log_bug
from ggml_engine.server.metrics import Metrics
from ggml_engine.server.prompts import Prepared
from ggml_engine.serving.reply import Choice, Reply
from ggml_engine.serving.request import ServingRequest


class Run:
    """See the module. `on_event` is called on the loop's thread, on which a run is made and started."""

    def __init__(
        self, model: HostedModel, prepared: Prepared, on_event: Callable[[Event], object], metrics: Metrics
    ) -> None:
        self._model = model
        self._prepared = prepared
        self._on_event = on_event
        self._metrics = metrics
        self._meter = metrics.meter(model.name)
        self._loop = asyncio.get_running_loop()
        self._news: deque[tuple[int, Update | Choice]] = deque()
        self._is_woken = False
        self._replies: list[Reply] = []
        vocabulary, config = model.engine.vocabulary, prepared.config
        self._readers = [
            ChoiceReader(
                index,
                None if prepared.new_parser is None else prepared.new_parser(),
                vocabulary,
                skips_ends=not config.ignore_eos,
            )
            for index in range(prepared.n_choices)
        ]
        self._left = set(range(prepared.n_choices))
        self._cut: set[int] = set()  # choices whose answer is whole, whatever the model would still say
        self._has_begun = False
        self._is_over = False
        self._is_counted = False

    def start(self, job: GenerationJob, partition: str) -> None:
        """Submit what was prepared of a job. Raises what `ServingRuntime.submit` raises; then nothing runs."""
        n = self._prepared.n
        try:
            for number, prompt in enumerate(self._prepared.prompts):
                request = ServingRequest(
                    prompt.tokens,
                    self._prepared.config,
                    n=n,
                    session=job.session,
                    partition=partition,
                    cache_prompt=job.cache_prompt,
                )
                self._replies.append(self._model.runtime.submit(request, _Listener(self, number * n)))
        except BaseException:
            self._is_over = True
            self.cancel()
            raise

    def cancel(self) -> None:
        """End it in whatever state it is; idempotent. Any thread."""
        for reply in self._replies:
            reply.cancel()

    # ---- the engine's threads

    def note(self, index: int, news: Update | Choice) -> None:
        """Something is new of a choice."""
        self._news.append((index, news))
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # the loop has ended, and with it whoever asked
                self.cancel()

    # ---- the loop's thread

    def _take(self) -> None:
        self._is_woken = False
        while self._news:
            index, news = self._news.popleft()
            if self._is_over:
                continue
            try:
                if isinstance(news, Update):
                    self._update(index, news)
                else:
                    self._settled(index, news)
            except Exception as error:  # of a parser or a renderer: nobody else would tell the client
                self._break(error)

    def _update(self, index: int, update: Update) -> None:
        self._begin()
        if update.prefill is not None:
            self._on_event(Progress(update.prefill.done, update.prefill.total))
        if update.tokens:
            self._meter.on_token(index, len(update.tokens))
        if index in self._cut or index not in self._left:
            return
        for said in self._within_bounds(index, self._readers[index].read(update)):
            self._on_event(said)

    def _within_bounds(self, index: int, said: list[Said]) -> Iterator[Said]:
        """One call ends an answer that may have no more."""
        for each in said:
            yield each
            is_call = isinstance(each.part, ToolCallEnd) and not each.part.malformed
            if is_call and not self._prepared.parallel_tool_calls:
                self._cut.add(index)
                self._choice(index).cancel()
                return

    def _settled(self, index: int, choice: Choice) -> None:
        if index not in self._left:
            return
        problem = _problem(choice, is_cut=index in self._cut)
        if problem is not None:
            self._fail(problem)
            return
        self._begin()
        reader = self._readers[index]
        if index not in self._cut:
            was_stopped = choice.reason is Reason.STOP
            for said in self._within_bounds(index, reader.finish(was_stopped=was_stopped)):
                self._on_event(said)
        self._left.discard(index)
        stop = choice.stats.stopped_by
        self._on_event(Ended(index, self._reason(index, choice), stop if not reader.n_calls else None))
        if not self._left:
            self._is_over = True
            self._count()
            self._on_event(Finished(self._usage()))

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self._on_event(Begun(self._usage()))
        for number, prompt in enumerate(self._prepared.prompts):
            for index in range(number * self._prepared.n, (number + 1) * self._prepared.n):
                if prompt.echo:
                    self._on_event(Said(index, ContentPart(prompt.echo)))

    def _fail(self, problem: HttpProblem) -> None:
        self._is_over = True
        self.cancel()
        self._count()
        self._on_event(Failed(problem))

    def _break(self, error: Exception) -> None:
        """End it for a bug: whoever waits for it is told, also where all choices had ended."""
        log_bug(error, "reading or writing an answer failed")
        try:
            self._fail(internal_error())
        except Exception as further:  # there is nobody left to tell
            log_bug(further, "a failure could not be told")

    def _choice(self, index: int) -> Choice:
        number, own = divmod(index, self._prepared.n)
        return self._replies[number].choices[own]

    def _reason(self, index: int, choice: Choice) -> StopReason:
        if choice.reason is Reason.LENGTH:
            most = self._prepared.config.max_tokens
            return "length" if most is not None and choice.stats.generated_tokens >= most else "context"
        if self._readers[index].n_calls:
            return "tool_calls"
        return "stop" if choice.stats.stopped_by is not None else "end"

    def _usage(self) -> Usage:
        stats = [reply.stats for reply in self._replies]
        return Usage(
            prompt_tokens=sum(len(prompt.tokens) for prompt in self._prepared.prompts),
            cached_tokens=sum(each.cached_tokens for each in stats),
            completion_tokens=sum(each.generated_tokens for each in stats),
            reasoning_tokens=sum(reader.n_reasoning for reader in self._readers),
        )

    def _count(self) -> None:
        if self._is_counted:
            return
        self._is_counted = True
        usage = self._usage()
        self._metrics.on_tokens(
            self._model.name,
            prompt=usage.prompt_tokens,
            cached=usage.cached_tokens,
            generated=usage.completion_tokens,
        )


class _Listener:
    """Passes on what is new of one reply, whose first choice has the number `first`."""

    def __init__(self, run: Run, first: int) -> None:
        self._run = run
        self._first = first

    def on_update(self, index: int, update: Update) -> None:
        self._run.note(self._first + index, update)

    def on_settled(self, index: int, choice: Choice) -> None:
        self._run.note(self._first + index, choice)


def _problem(choice: Choice, *, is_cut: bool) -> HttpProblem | None:
    """What a choice failed with; None for one that came to an end of its own."""
    if choice.reason is Reason.FAILED:
        error = choice.error or RuntimeError("a generation failed without an error")
        problem = problem_of(error)
        if problem.code == "internal_error":
            log_bug(error, "a generation failed")
        return problem
    if choice.reason is Reason.SHUTDOWN:
        return HttpProblem(503, "shutting_down", "the server, or this model, is being closed")
    if choice.reason is Reason.CANCELLED and not is_cut:
        return HttpProblem(409, "cancelled", "the request was cancelled: its session was closed")
    return None
