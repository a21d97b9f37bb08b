"""Two conversations of a desktop assistant over one model: edit, retry, and a cancel button.

    python examples/assistant.py [--model smollm2]

Nothing here blocks the thread of the user interface for longer than it takes to queue a command: replies arrive
through a callback on the engine's thread, which only hands them on.
"""

from __future__ import annotations

import argparse
import queue
from dataclasses import dataclass, field

from ggml_engine import Engine, GenConfig, Generation, SamplerConfig, Session, Update


@dataclass
class Chat:
    """One window: its session, its turns, the reply that is being written, and what is to be said after it."""

    name: str
    session: Session
    turns: list[dict[str, str]] = field(default_factory=list)
    reply: Generation | None = None
    next: str | None = None


class Assistant:
    """The application: what its buttons do."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self.engine = engine
        self.config = GenConfig(max_tokens=max_tokens, sampler=SamplerConfig(temperature=0.0))
        self.events: queue.Queue[tuple[Chat, str | None]] = queue.Queue()  # a GUI would post to its own loop
        self.n_running = 0

    def open(self, name: str) -> Chat:
        """A new window."""
        return Chat(name, self.engine.session())

    def send(self, chat: Chat, text: str) -> None:
        """The user said something; a reply that is still being written is cut off first."""
        if chat.reply is not None:
            chat.next = text
            chat.reply.cancel()
            return
        turns = [*chat.turns, {"role": "user", "content": text}]
        tokens = self.engine.encode_chat(turns)
        chat.turns = turns

        def show(update: Update) -> None:
            if update.text:
                self.events.put((chat, update.text))

        # only what differs from what the session holds is read again
        self.n_running += 1
        chat.reply = chat.session.generate_from(
            tokens, self.config, on_update=show, on_settled=lambda _: self.events.put((chat, None))
        )

    def edit(self, chat: Chat, text: str) -> None:
        """The user changed the last question: it and its answer are replaced."""
        self._drop_last_turn(chat)
        self.send(chat, text)

    def retry(self, chat: Chat) -> None:
        """The user wants another answer to the last question."""
        question = next(turn["content"] for turn in reversed(chat.turns) if turn["role"] == "user")
        self.edit(chat, question)

    def cancel(self, chat: Chat) -> None:
        """The cancel button: takes effect before the next token, or inside the reading of a long prompt."""
        if chat.reply is not None:
            chat.reply.cancel()

    def run(self) -> None:
        """Show what comes until all replies have ended. (A GUI has its own loop in place of this.)"""
        while self.n_running:
            chat, text = self.events.get(timeout=120)
            if text is None:
                self._end(chat)
            else:
                print(f"[{chat.name}] {text!r}")

    def _end(self, chat: Chat) -> None:
        reply, chat.reply = chat.reply, None
        self.n_running -= 1
        if reply is None or reply.error is not None:
            print(f"[{chat.name}] failed: {reply.error if reply else 'no reply'}")
            chat.turns.pop()  # the question can be asked again
        else:
            chat.turns.append({"role": "assistant", "content": reply.text})
            reason, stats = reply.reason.value if reply.reason else "running", reply.stats
            print(f"[{chat.name}] {reason}: {stats.reused_tokens} tokens were kept, {stats.evaluated_tokens} read")
        text, chat.next = chat.next, None
        if text is not None:
            self.send(chat, text)

    @staticmethod
    def _drop_last_turn(chat: Chat) -> None:
        while chat.turns and chat.turns.pop()["role"] != "user":
            pass


def main() -> None:
    """Play a short scene."""
    parser = argparse.ArgumentParser(description="Two conversations: edit, retry, cancel.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    with Engine.load(arguments.model, ctx=4096) as engine:
        assistant = Assistant(engine, arguments.max_tokens)
        work, home = assistant.open("work"), assistant.open("home")
        assistant.send(work, "Name three colours.")
        assistant.send(home, "What is the capital of Italy?")
        assistant.run()  # both in the same forwards

        assistant.edit(home, "What is the capital of Spain?")
        assistant.retry(work)
        assistant.run()

        assistant.send(work, "Tell me a very long story about each of them.")
        assistant.cancel(work)
        assistant.send(home, "Tell me everything about it.")
        assistant.send(home, "Stop. Just its name, please.")  # cuts the reply off
        assistant.run()


if __name__ == "__main__":
    main()
