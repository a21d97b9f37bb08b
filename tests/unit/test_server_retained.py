"""A prompt in the tokens that are kept of its conversation: the same text, and never another special token."""

from __future__ import annotations

import random
from typing import Any

import pytest
from dialect_fakes import fake_server, run

from ggml_engine.server.retained import Spelling, with_retained

PAIRS = ("ab", "bc", "ca", "abc", "\n ", "<|", "end", "|>", "é")
END, MARK, NOTHING = 256, 257, 258
FIRST_PAIR = 259


class Pieces:
    """A vocabulary of bytes, two special tokens, one without text, and pieces of several characters."""

    special_tokens = {"<|end|>": END, "<tool>": MARK}  # noqa: RUF012

    def piece(self, token: int) -> bytes:
        if token == MARK:  # a user's token has a text
            return b"<tool>"
        if token in (END, NOTHING):
            return b""
        return bytes([token]) if token < END else PAIRS[token - FIRST_PAIR].encode()


def plain(text: str) -> list[int]:
    return list(text.encode())


def pair(text: str) -> int:
    return FIRST_PAIR + PAIRS.index(text)


def joined(tokens: list[int], *retained: list[int]) -> list[int]:
    return with_retained(tokens, retained, Spelling(Pieces()))


def test_what_spells_the_same_is_in_the_tokens_that_are_kept() -> None:
    held = [*plain("xab"), pair("bc")]
    assert joined([*plain("x"), pair("ab"), pair("bc"), END, *plain("y")], held) == [*held, END, *plain("y")]
    rendered = [*plain("xa"), pair("bc"), END]
    assert joined(rendered, held) == rendered, "the texts part after what is the same already"


def test_both_are_cut_between_tokens() -> None:
    held = plain("xabc")
    assert joined([*plain("x"), pair("ab"), pair("ca"), END], held) == [*plain("xab"), pair("ca"), END]
    assert joined([*plain("x"), pair("abc"), END], [*plain("xab")]) == [*plain("x"), pair("abc"), END]


def test_the_start_of_a_reply_may_have_been_cut_otherwise_than_it_is_rendered() -> None:
    held = [*plain("user\n"), *plain(" x")]
    assert joined([*plain("user"), pair("\n "), *plain("x"), END], held) == [*held, END]


@pytest.mark.parametrize(
    ("rendered", "held"),
    [
        (plain("a<|end|>b"), [*plain("a"), END, *plain("b")]),
        ([*plain("a"), END, *plain("b")], plain("a<|end|>b")),
        ([*plain("a"), MARK], plain("a<tool>")),
        (plain("a<tool>"), [*plain("a"), MARK]),
        ([*plain("a"), NOTHING, *plain("b")], plain("ab")),
        (plain("ab"), [*plain("a"), NOTHING, *plain("b")]),
    ],
)
def test_what_spells_a_special_token_is_none(rendered: list[int], held: list[int]) -> None:
    assert joined(rendered, held) == rendered


def test_the_row_that_goes_furthest_is_taken_and_of_those_that_are_alike_the_first() -> None:
    rendered = [pair("abc"), pair("abc"), END]
    short, long, other = [*plain("abc")], [*plain("ab"), *plain("cabc")], [pair("ab"), *plain("cabc")]
    assert joined(rendered, short, long, other) == [*long, END]
    assert joined(rendered, other, long) == [*other, END]
    assert joined(rendered, plain("abd"), []) == rendered
    assert joined(rendered, rendered, long) == rendered


def test_half_a_character_is_no_end_of_what_is_the_same() -> None:
    first, second = "é".encode()
    assert joined([pair("é"), END], [first]) == [pair("é"), END]
    assert joined([pair("é"), END], [first, second]) == [first, second, END]


def test_whatever_is_kept_the_text_stays_and_special_tokens_stay_where_they_are() -> None:
    rng = random.Random(5)
    spelling = Spelling(Pieces())

    def cut(text: str) -> list[int]:
        """Some tokens that spell the text; what is in capitals is special."""
        found: list[int] = []
        while text:
            pieces = [piece for piece in PAIRS if text.startswith(piece)]
            if text[0] in "EM":
                found.append({"E": END, "M": MARK}[text[0]])
                text = text[1:]
            elif pieces and rng.random() < 0.7:
                piece = rng.choice(pieces)
                found.append(pair(piece))
                text = text[len(piece) :]
            else:
                found += plain(text[0])
                text = text[1:]
        return found

    n_changed = 0
    for _ in range(2000):
        text = "".join(rng.choices(["abc", "é", "E", "M", "<|end|>", "\n ", "<tool>"], k=rng.randint(1, 9)))
        rendered = cut(text)
        held = [cut(text[: rng.randint(0, len(text))] + rng.choice(["", "x", "E"])) for _ in range(3)]
        found = with_retained(rendered, held, spelling)
        assert "".join(map(spelling, found)) == "".join(map(spelling, rendered))
        assert [t for t in found if t in (END, MARK)] == [t for t in rendered if t in (END, MARK)]
        n_changed += found != rendered
    assert n_changed > 200


class TestOverHttp:
    def test_a_named_session_goes_on_in_its_own_tokens_and_nothing_else_does(self) -> None:
        prompt = "[user]hi[assistant]"
        asked: list[tuple[str, str]] = []

        async def test() -> None:
            async with fake_server() as server:

                def retained(partition: str, name: str) -> list[list[int]]:
                    asked.append((partition, name))
                    return [[*prompt.encode()[:-1], 0]]

                def twice(tokens: list[int], rows: Any, spelling: Any) -> list[int]:
                    assert "".join(map(spelling, tokens)) == prompt
                    assert list(rows) == [[*prompt.encode()[:-1], 0]]
                    return [*tokens, 33]

                server.runtime.retained_tokens = retained  # type: ignore[method-assign]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("ggml_engine.server.prompts.with_retained", twice)
                    found = await server.chat(headers={"X-Session-ID": "a"})
                    assert list(server.request.tokens) == [*prompt.encode(), 33]
                    assert found.json()["usage"]["prompt_tokens"] == len(prompt) + 1
                    await server.post("/v1/completions", prompt=prompt, session_id="b")
                    assert list(server.request.tokens) == [*prompt.encode(), 33]
                    assert asked == [("", "a"), ("", "b")]
                    await server.chat()
                    assert list(server.request.tokens) == list(prompt.encode())
                    await server.chat(session_id="a", cache_prompt=False)
                    assert list(server.request.tokens) == list(prompt.encode())
                    await server.post("/v1/completions", prompt=[*prompt.encode()], session_id="b")
                    assert list(server.request.tokens) == list(prompt.encode())
                assert len(asked) == 2

        run(test())
