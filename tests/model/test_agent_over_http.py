"""A coding agent's conversation through HTTP: each turn evaluates what is new, whoever goes on with it.

By token ids the counts are those of `agent_conversation.expected`. By messages an answer comes back as text: it must
cost no more than by token ids, however the tokenizer would cut it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from agent_conversation import CANCELLED, N_TURNS, SHORT, WHOLE, Size, converse, request, request_messages, system_text
from http_agent import Spied, TokenAgent, spied_server

End = Literal["initial", "every"]


def pass_time(spied: Spied) -> None:
    """Until every named session was idle too long."""
    runtime = spied.runtime
    runtime._clock = lambda: time.monotonic() + 10_000
    runtime.expire()
    assert not runtime.sessions()
    runtime._clock = time.monotonic


def by_token_ids(spied: Spied, name: str | None, end: End, size: Size) -> None:
    """The conversation; another session goes on with it, cancels, asks again, and is evicted.

    A request without a name is a beginning each time, so its prompt's end is captured with `initial`, too.
    """
    agent = TokenAgent(spied, size, name)
    history = converse(agent, spied.encode, "every" if name is None else "session", size)
    asked = spied.encode(request(0, size.n_functions, attempt=1))
    asked = [*spied.encode("<|im_end|>\n"), *asked]
    other = TokenAgent(spied, size, "other")
    longer = [*history, *asked]
    # with `initial` the prompt that was cancelled and sent again is the last one that was a beginning
    n_captured = len(spied.prompts[CANCELLED + 2 if end == "initial" and name is not None else -1])
    longer += other.ask(longer)
    assert other.evaluated == [len(history) + len(asked) - n_captured], "another session has what was captured"
    again = [*longer, *asked]
    other.ask_and_cancel(again)
    other.ask(again)
    assert other.evaluated[1:] == [1 + len(asked), 1], "a prompt that was read is not read again"
    pass_time(spied)
    other.ask([*again, 7])
    assert other.evaluated[3:] == [1], "what was captured outlives the session"


WAYS = [("a", "every"), (None, "initial")]


@pytest.mark.parametrize(
    ("name", "end"),
    [*WAYS, *(pytest.param(*way, marks=pytest.mark.slow) for way in [("a", "initial"), (None, "every")])],
)
def test_a_short_conversation_evaluates_what_is_new(name: str | None, end: End) -> None:  # R75 R85
    with spied_server(prefix_checkpoint_prompt_end=end) as spied:
        by_token_ids(spied, name, end, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "end"), WAYS)
def test_a_whole_conversation_evaluates_what_is_new(name: str | None, end: End) -> None:  # R75 R85
    with spied_server(prefix_checkpoint_prompt_end=end, ctx=16384) as spied:
        by_token_ids(spied, name, end, WHOLE)


class Talk:
    """A conversation of messages, whose answers are random pieces of words without a space between.

    No tokenizer cuts such a text as it was written.
    """

    def __init__(self, spied: Spied, n_characters: int) -> None:
        self.spied = spied
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system_text()}]
        self.grammar = f"root ::= [a-z]{{{n_characters}}} [a-z]"
        self.n_asked = 0
        self.n_cut_otherwise = 0

    def body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        self.n_asked += 1
        chosen = {"grammar": self.grammar, "temperature": 100.0, "top_k": 0, "top_p": 1, "min_p": 0}
        return {"messages": messages, "seed": self.n_asked, **chosen}

    def ask(self, new: list[dict[str, Any]], name: str | None, *held: list[int]) -> list[int]:
        """Send the messages and `new` ones, of whose prompt one of `held` must be reused; all that is held then."""
        spied, messages = self.spied, [*self.messages, *new]
        found = spied.post("/v1/chat/completions", self.body(messages), name)
        prompt, reply = spied.prompts[-1], spied.replies[-1].choices[0].tokens
        engine = spied.server.host.loaded()[0].engine
        rendered = [int(token) for token in engine.encode_chat(self.rendered(messages))]
        assert spied.spelled(prompt) == spied.spelled(rendered), "another text than the template's"
        n_held = max(map(len, held), default=0)
        if held:
            assert any(prompt[: len(row)] == row for row in held if len(row) == n_held)
        assert spied.replies[-1].stats.evaluated_tokens == max(1, len(prompt) - n_held)
        self.n_cut_otherwise += prompt != rendered
        message = found["choices"][0]["message"]
        assert message["content"] == spied.vocabulary.decode(reply, continues=True)
        self.messages = [*messages, {"role": "assistant", "content": message["content"]}]
        return [*prompt, *reply[:-1]]

    def rendered(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As this model's template takes them: calls and results are texts."""
        from ggml_engine.chat.replies import detect_format, prepare_messages

        engine = self.spied.server.host.loaded()[0].engine
        tool_format = detect_format(engine.template.source, engine.vocabulary.special_tokens)
        return prepare_messages(tool_format, messages)[0]


def by_messages(spied: Spied, n_functions: int, n_characters: int, n_turns: int) -> None:
    talk = Talk(spied, n_characters)
    held: list[int] = []
    for turn in range(n_turns):
        held = talk.ask(request_messages(turn, n_functions), "a", *[held] * bool(turn))
    assert talk.n_cut_otherwise, "answers that are cut as they were written show nothing"
    # a connection that is lost, and the same request once more
    new = request_messages(n_turns, n_functions)
    body = {**talk.body([*talk.messages, *new]), "grammar": "root ::= [a-z]+"}
    spied.post_and_leave("/v1/chat/completions", body, "a")
    assert spied.prompts[-1][: len(held)] == held
    talk.ask(new, "a", spied.prompts[-1][:-1])
    # another session has what was captured: the last prompt, in the tokens that the first one has
    talk.ask(request_messages(n_turns + 1, n_functions), "b", spied.prompts[-1])
    pass_time(spied)
    talk.ask(request_messages(n_turns + 2, n_functions), "a", spied.prompts[-1])


@pytest.fixture(scope="module")
def every() -> Iterator[Spied]:
    with spied_server(prefix_checkpoint_prompt_end="every") as spied:
        yield spied


def test_an_answer_that_comes_back_as_text_is_not_read_again(every: Spied) -> None:  # R75 R85
    by_messages(every, 0, 40, 3)


@pytest.mark.slow
def test_so_it_is_in_a_long_conversation_with_tools() -> None:  # R75 R85
    with spied_server(prefix_checkpoint_prompt_end="every", ctx=16384) as spied:
        by_messages(spied, 1, 60, N_TURNS)
