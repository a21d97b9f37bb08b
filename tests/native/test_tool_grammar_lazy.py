"""Where the model decides whether to call, the text is free until it begins a call, and a call from there on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from replies import TOOLS, calls, read
from tool_grammars import CALL, CALL_NOW, ENDS, FORMATS, PARIS, followers, tool
from vocab_files import CONTROL, spm, write

from ggml_engine.chat.replies import ReplyMessage
from ggml_engine.errors import InputError
from ggml_engine.ggml.candidates import best_of
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.lazy_grammar import LazyGrammar, Trigger
from ggml_engine.ggml.sampler import Sampler, SamplerConfig
from ggml_engine.ggml.vocab import StreamDecoder, Vocabulary

END = 2
# tokens that hold the end of a mark and more, control tokens that are marks, and a piece that no mark is in
MERGED = (b"ool_call>\n{", b"_call>!", b"call> and", b"`json\n{", b"<tool_cal")
MARKS = (b"<tool_call>", b"</tool_call>", b"<think>", b"</think>", b"[TOOL_CALLS]", b"<|channel|>", b"<|message|>")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    parts = spm(add_space=False)
    for text, kind in [*((text, 1) for text in MERGED), *((text, CONTROL) for text in MARKS)]:
        parts["tokens"].append(text)
        parts["types"].append(kind)
        parts["scores"].append(-1000.0)
    with GGUFFile.open(write(tmp_path_factory.mktemp("v") / "v.gguf", parts)) as file:
        return Vocabulary.load(file)


def lazy(name: str = "hermes", **options: Any) -> LazyGrammar:
    return FORMATS[name].lazy_grammar(TOOLS, **options)


def tokens_of(vocabulary: Vocabulary, *pieces: str | bytes) -> list[int]:
    """Texts byte by byte, pieces given as bytes as the one token that they are."""
    found: list[int] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            found.append(next(i for i in range(vocabulary.n_tokens) if vocabulary.text(i).encode() == piece))
        else:
            found += [3 + byte for byte in piece.encode()]
    return found


def refused_at(vocabulary: Vocabulary, grammar: LazyGrammar, *pieces: str | bytes) -> int | None:
    """The number of the token that is refused; None where all are accepted, and the end after them."""
    with Sampler(vocabulary, SamplerConfig(grammar=grammar)) as sampler:
        for number, token in enumerate([*tokens_of(vocabulary, *pieces), END]):
            try:
                sampler.accept(token)
            except InputError:
                return number
    return None


# ---- free, and then not


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_without_a_mark_is_free(vocabulary: Vocabulary, name: str) -> None:
    for text in ("", "Hello", '{"a": 1}', "<tool", "call:f{}", '```python\nx = {"name": 1}\n```', " { [", "to = f"):
        assert refused_at(vocabulary, lazy(name), text) is None, text


GOOD = {
    "hermes": [f"Well. {CALL}", "<tool_call>{" + CALL.split("{", 1)[1]],
    "generic": [CALL],
    "qwen3-coder": [
        "a<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        "<function=now>\n</function>\n</tool_call>",
    ],
    "llama3": [
        f'\n{{"name": "get_weather", "parameters": {PARIS}}}',
        '{ "type": "function",\n"name" : "now", "parameters": {}}',
        '<|python_tag|>{"name": "now", "parameters": {}}',
    ],
    "mistral": [f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}, "id": "a1b2c3d4e"}}]'],
    "mistral-args": [f"Well.[TOOL_CALLS]get_weather[ARGS]{PARIS}"],
    "mistral-ids": [f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}"],
    "gemma": [
        f'Well.\n```tool_call\n{{"name": "get_weather", "parameters": {PARIS}}}\n```',
        '```tool_code\n{"name": "now", "parameters": {}}\n```',
        '```json\n{\n"name": "now", "parameters": {}}\n```',
        '{"name": "now", "parameters": {}}',
    ],
    "gemma4": ['a<|tool_call>call:get_weather{city:<|"|>a<b"}<|"|>,days:3}<tool_call|>'],
    "functiongemma": ["<start_function_call>call:now{}<end_function_call>"],
    "gpt-oss": [
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{PARIS}",
        " to=functions.now<|channel|>commentary json<|message|>{}",
        "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}",
    ],
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_has_begun_is_one_of_the_tools_or_refused(vocabulary: Vocabulary, name: str) -> None:
    for text in GOOD[name]:
        assert refused_at(vocabulary, lazy(name), text) is None, text
        made = ReplyMessage.of(read(lambda: FORMATS[name].parser(TOOLS), [text]))
        assert len(made.tool_calls) == 1, text
        n = len(text.encode())
        assert refused_at(vocabulary, lazy(name), text[:-1]) == n - 1, text  # the end, in the middle of a call
        assert refused_at(vocabulary, lazy(name), text + "x") == n, text  # only the end may follow
        if "get_weather" in text:
            other = text.replace("get_weather", "get_whether").encode()
            at = refused_at(vocabulary, lazy(name), text.replace("get_weather", "get_whether"))
            if name in ("llama3",):  # bare JSON of another name is no call
                assert at is None
            else:
                assert at == other.index(b"get_whether") + len("get_w")


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("qwen3-coder", "functiongemma")])
def test_arguments_follow_the_schema_once_a_call_has_begun(vocabulary: Vocabulary, name: str) -> None:
    text = next(text for text in GOOD[name] if "days:3" in text or PARIS in text)
    wrong = text.replace("days:3", "days:true").replace(PARIS, '{"city": 3}')
    at = refused_at(vocabulary, lazy(name), wrong)
    assert at is not None
    assert wrong.encode()[at : at + 1] in (b"t", b"3")


def test_several_calls_follow_each_other_where_they_may(vocabulary: Vocabulary) -> None:
    two = f"{CALL}\n{CALL_NOW}"
    assert refused_at(vocabulary, lazy(), two) == len(CALL)
    assert refused_at(vocabulary, lazy(parallel=True), two) is None
    assert refused_at(vocabulary, lazy(parallel=True), CALL + "\nWell.") == len(CALL) + 1


# ---- where the mark is cut


def test_the_mark_may_be_a_control_token_or_any_cut_of_its_text(vocabulary: Vocabulary) -> None:
    rest = CALL.removeprefix("<tool_call>")
    for begin in (["<tool_call>"], [b"<tool_call>"], ["<t", b"ool_call>\n{"], [b"<tool_cal", "l>"]):
        wanted = rest[2:] if b"ool_call>\n{" in begin else rest
        assert refused_at(vocabulary, lazy(), "Well. ", *begin, wanted) is None, begin
        at = refused_at(vocabulary, lazy(), "Well. ", *begin, wanted.replace('"name"', '"game"'))
        assert at is not None, begin


def test_a_token_that_goes_on_wrongly_behind_the_mark_is_refused_and_another_one_drawn(vocabulary: Vocabulary) -> None:
    """libllama's own lazy grammar takes it, and ends the process."""
    wrong = tokens_of(vocabulary, b"_call>!")[0], tokens_of(vocabulary, b"call> and")[0]
    for temperature in (0.0, 1.0):
        sampler = Sampler(vocabulary, SamplerConfig(grammar=lazy(), temperature=temperature, seed=3))
        for token in tokens_of(vocabulary, "<tool"):
            sampler.accept(token)
        row = np.zeros(vocabulary.n_rows, np.float32)
        row[[*wrong, 3 + ord("_")]] = 40.0, 39.0, 20.0
        with pytest.raises(InputError, match="does not fit the grammar"):
            sampler.accept(wrong[0])
        assert sampler.sample(row) == wrong[1]  # "<toolcall> and" has no mark
        sampler.accept(3 + ord("_"))
        row[[*wrong, 3 + ord("x")]] = 0.0, 50.0, 40.0
        assert sampler.sample(row) == 3 + ord("x")  # "<tool_call> and" has one


def test_marks_among_the_thoughts_do_not_count(vocabulary: Vocabulary) -> None:
    assert refused_at(vocabulary, lazy(), "<think>a <tool_call> b</think>c") is None
    assert refused_at(vocabulary, lazy(), b"<think>", "a <tool_call> b", b"</think>", "c") is None
    assert refused_at(vocabulary, lazy(prompt_end="<think>\n"), "a <tool_call> b</think>c") is None
    assert refused_at(vocabulary, lazy(), "a <think> <tool_call> b") is not None  # no thoughts but at the beginning
    at = refused_at(vocabulary, lazy(), "<think>a</think>\n<tool_call>b")
    assert at == len("<think>a</think>\n<tool_call>")
    thinking = f"a<|channel>thought\n<|tool_call> b<channel|>{GOOD['gemma4'][0]}"
    assert refused_at(vocabulary, lazy("gemma4"), thinking) is None
    assert refused_at(vocabulary, lazy("gemma4"), thinking[:-1]) == len(thinking) - 1


def test_json_that_names_no_tool_is_free_where_calls_are_bare(vocabulary: Vocabulary) -> None:
    for name in ("llama3", "gemma"):
        for text in (
            '{"name": "Alice", "age": 3}',
            '{"name": "nowhere"}',
            'See {"name": "now"}',
            '{"x": {"name": "now"}}',
        ):
            assert refused_at(vocabulary, lazy(name), text) is None, (name, text)


# ---- what it costs, and what it keeps


def test_candidates_do_until_a_token_is_refused(vocabulary: Vocabulary) -> None:
    """The whole row is not asked for, before the mark and after it."""
    whole: list[int] = []
    text = f"Well, then. {CALL}"
    config = SamplerConfig(grammar=lazy(), temperature=1.0, seed=1, top_k=8)
    plain = SamplerConfig(temperature=1.0, seed=1, top_k=8)
    sampler, free = Sampler(vocabulary, config), Sampler(vocabulary, plain)
    assert sampler.need == free.need
    assert sampler.need.n_best
    random = np.random.default_rng(5)
    for number, token in enumerate(tokens_of(vocabulary, text)):
        row = random.normal(0, 1, vocabulary.n_rows).astype(np.float32)
        row[token] += 30.0

        def give_row(row: Any = row, number: int = number) -> Any:
            whole.append(number)
            return row

        assert sampler.sample_from(best_of(row, sampler.need), give_row) == token
        assert free.sample_from(best_of(row, free.need), give_row) == token
        sampler.accept(token)
    assert whole == []


def test_before_the_mark_tokens_are_drawn_as_without_a_grammar(vocabulary: Vocabulary) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 9, "repeat_penalty": 1.2}
    one, other = (
        Sampler(vocabulary, SamplerConfig(grammar=lazy(), **options)),
        Sampler(vocabulary, SamplerConfig(**options)),
    )
    random = np.random.default_rng(1)
    for _ in range(200):
        row = random.normal(0, 2, vocabulary.n_rows).astype(np.float32)
        row[vocabulary.special_tokens["<tool_call>"]] = -50.0
        token = one.sample(row)
        assert token == other.sample(row)
        one.accept(token)
        other.accept(token)


def test_a_clone_and_a_reset_are_where_they_should_be(vocabulary: Vocabulary) -> None:
    text = tokens_of(vocabulary, CALL)
    n = len("<tool_call>")
    for cut in (n - 2, n, n + 20):
        sampler = Sampler(vocabulary, SamplerConfig(grammar=lazy()))
        for token in text[:cut]:
            sampler.accept(token)
        clone = sampler.clone()
        for token in text[cut:n]:
            clone.accept(token)
        with pytest.raises(InputError, match="does not fit"):
            clone.accept(3 + ord("%"))
        for token in text[max(cut, n) :]:
            clone.accept(token)
        clone.accept(END)
        clone.close()
        for token in text[cut:]:  # the first one is where it was
            sampler.accept(token)
        sampler.reset()
        for token in tokens_of(vocabulary, "% <tool_call"):
            sampler.accept(token)
        sampler.accept(tokens_of(vocabulary, ">")[0])
        with pytest.raises(InputError, match="does not fit"):
            sampler.accept(3 + ord("%"))


# ---- what cannot be


def test_a_schema_that_cannot_be_obeyed_leaves_arguments_free(vocabulary: Vocabulary) -> None:
    tools = [*tool({"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}}), *TOOLS]
    for name, begin in (("hermes", "Well. "), ("qwen3-coder", ""), ("gemma4", "")):
        grammar = FORMATS[name].lazy_grammar(tools)
        with pytest.raises(InputError, match="'minimum' cannot be obeyed"):
            FORMATS[name].grammar(tools)
        text = {
            "hermes": '<tool_call>\n{"name": "f", "arguments": {"n": 1, "x": [true]}}\n</tool_call>',
            "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
            "gemma4": "<|tool_call>call:f{n:1,x:[true]}<tool_call|>",
        }[name]
        assert refused_at(vocabulary, grammar, begin + text) is None
        assert len(ReplyMessage.of(read(lambda name=name: FORMATS[name].parser(tools), [begin + text])).tool_calls) == 1
        # the others are held to theirs
        wrong = GOOD[name][0].replace(PARIS, '{"city": 3}').replace("city", "town")
        assert refused_at(vocabulary, grammar, wrong) is not None


def test_rules_that_cannot_be_are_refused_when_the_sampler_is_made(vocabulary: Vocabulary) -> None:
    for rules, message in (("a ::= b", "'b'"), ('a ::= "x', "found the end"), ("", "'a'")):
        with pytest.raises(InputError, match=message):
            Sampler(vocabulary, SamplerConfig(grammar=LazyGrammar(rules, (Trigger(("x",), "a"),))))


# ---- whatever is let through is read


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "llama3", "mistral", "gemma", "gemma4", "gpt-oss"])
def test_a_model_that_writes_at_random_after_a_mark_calls(vocabulary: Vocabulary, name: str) -> None:
    """Of the tokens that are let through any may come; the call is read, and its arguments are what its schema says."""
    begins = {
        "llama3": '{"name": "now"',
        "mistral": "[TOOL_CALLS]",
        "gemma": "```tool_call",
        "gemma4": "<|tool_call>",
        "gpt-oss": "<|channel|>commentary to=",
    }
    begin, mark = begins.get(name, "<tool_call>"), ENDS.get(name, "")
    for seed in range(6):
        random = np.random.default_rng(seed)
        sampler = Sampler(vocabulary, SamplerConfig(grammar=lazy(name, parallel=True), seed=seed, top_k=0, top_p=1.0))
        decoder = StreamDecoder(vocabulary, continues=True, shown=frozenset(vocabulary.special_tokens.values()))
        text = ""
        given = tokens_of(vocabulary, begin)
        for number in range(3_000):
            row = random.normal(0, 1, vocabulary.n_rows).astype(np.float32)
            row[[END, *(3 + ord(c) for c in '"}],|<>\n/`')]] += 5.0
            for following in followers(text[-20:], mark):
                row[3 + ord(following)] += 12.0
            token = given[number] if number < len(given) else sampler.sample(row)
            if token == END:
                break
            sampler.accept(token)
            text += decoder.push(token)
        else:
            raise AssertionError(text)
        made = ReplyMessage.of(read(lambda: FORMATS[name].parser(TOOLS), [text]))
        assert made.tool_calls, text
        assert made.content == "", text
        for called, arguments in calls(made):
            assert set(json.loads(arguments)) <= {"get_weather": {"city", "days", "units"}, "now": set()}[called]
