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
    """One window: its session, its turns, and the reply that is being written."""

    name: str
    session: Session
    turns: list[dict[str, str]] = field(default_factory=list)
    reply: Generation | None = None


class Assistant:
    """The application: what its buttons do."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self.engine = engine
        self.config = GenConfig(max_tokens=max_tokens, sampler=SamplerConfig(temperature=0.0))
        self.events: queue.Queue[tuple[str, str | None]] = queue.Queue()  # a GUI would post to its own loop

    def open(self, name: str) -> Chat:
        """A new window."""
        return Chat(name, self.engine.session())

    def send(self, chat: Chat, text: str) -> None:
        """The user said something."""
        chat.turns.append({"role": "user", "content": text})
        tokens = self.engine.encode_chat(chat.turns)

        def show(update: Update) -> None:
            if update.text:
                self.events.put((chat.name, update.text))

        # only what differs from what the session holds is read again
        chat.reply = chat.session.generate_from(
            tokens, self.config, on_update=show, on_settled=lambda _: self.events.put((chat.name, None))
        )

    def edit(self, chat: Chat, text: str) -> None:
        """The user changed the last question: it and its answer are replaced."""
        while chat.turns and chat.turns[-1]["role"] != "user":
            chat.turns.pop()
        chat.turns.pop()
        self.send(chat, text)

    def cancel(self, chat: Chat) -> None:
        """The cancel button: takes effect before the next token, or inside the reading of a long prompt."""
        if chat.reply is not None:
            chat.reply.cancel()

    def wait(self, chats: list[Chat]) -> None:
        """Show what comes until all replies have ended. (A GUI has its own loop in place of this.)"""
        n_running = len(chats)
        while n_running:
            name, text = self.events.get(timeout=120)
            if text is None:
                n_running -= 1
            else:
                print(f"[{name}] {text!r}")
        for chat in chats:
            if chat.reply is not None:
                chat.turns.append({"role": "assistant", "content": chat.reply.text})


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
        assistant.wait([work, home])  # both in the same forwards

        assistant.edit(home, "What is the capital of Spain?")
        assistant.wait([home])
        if home.reply is not None:
            stats = home.reply.stats
            print(f"edited: {stats.reused_tokens} tokens were kept, {stats.evaluated_tokens} read")

        assistant.send(work, "Tell me a very long story about each of them.")
        assistant.cancel(work)
        assistant.wait([work])
        print(f"cancelled: {work.reply.reason.value if work.reply and work.reply.reason else 'running'}")


if __name__ == "__main__":
    main()
