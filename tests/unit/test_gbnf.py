"""Grammars are checked before libllama sees them: form, size, width, left recursion."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggml_engine.errors import InputError
from ggml_engine.ggml.gbnf import check_grammar
from ggml_engine.ggml.gbnf_parser import MAX_ELEMENTS

# whose rules for numbers and spaces overlap a little
JSON = r"""
root ::= ws object ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
list ::= "[" ws (value ("," ws value)*)? "]" ws
value ::= object | list | string | number | ("true" | "null") ws
string ::= "\"" ([^"\\] | "\\" (["\\nrt] | "u" [0-9a-f]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
PADDING = "".join(f'\nj{i} ::= [a-z]* "{i}" [a-y]* "x"' for i in range(120))
PLENTY = 'j800 ::= "e"' + "".join(f'\nj{i} ::= [a-z]* "{i}" ([a-y] "x")* j{i + 1}' for i in range(800))
VALUE = """
v{0} ::= ["] ([^"\\\\] | "\\\\" .)* ["] | "[" (v{0} ("," v{0})*)? "]" | "<" t{0} | [a-z] [a-z0-9]{{0,63}}
t{0} ::= [<] t{0} | [|] u{0} | [^<|] t{0}
u{0} ::= [<] t{0} | [>] | [^<>] t{0}
"""
GOOD = [
    JSON,
    'root ::= "yes" | "no"',
    "root  ::= [a-z]+ # comment\nother ::= root\n",
    'root ::= ("a"*)*',
    'root ::= "a"{2} "b"{2,} "c"{0,5}',
    'root ::= item ("," item)*\r\nitem ::=\n  [0-9]+ |\n  "x"',
    'root ::= "\\x41\\u00e9\\U0001F600\\n\\"" [^\\]\\-]',
    "root ::= <[3]> !<think> .",
    'root ::= "(" root ")" | "x"',
    "root ::= " + "(" * 100 + '"a"' + ")" * 100,
    'root ::= "a"{0,2000} [0-9]{2000} x{50} x{0,50}\nx ::= "b"',
    'root ::= ("a"?){8} "b" ("a"?){8}',
    "root ::= [ ]* ws ws\nws ::= [ \\t\\n]*",
    'root ::= ("ab" | "a" "c" | "b")* " " [a-z]{0,100} [a-z]{0,100}',
    'root ::= v\nv ::= "(" v ")" | "[" (v ("," v)*)? "]" | ["] ([^"\\x5c] | "\\x5c" .)* ["] | [0-9]+ ("." [0-9]+)?',
    "root ::= (" + " | ".join(f'"a{i}"' for i in range(300)) + ")*",
    "root ::= (" + " | ".join(f'"{chr(0x4E00 + i)}"' for i in range(500)) + ")*",
    "root ::= w\nw ::= " + " | ".join(f'"{chr(0x4E00 + i)}" w "{i}"' for i in range(12)) + ' | "!"',
    PADDING.strip() + '\nroot ::= [a-z]* "!"',
    PLENTY + '\nroot ::= "a"*',
    "root ::= " + " | ".join(f'"{i}" v{i}' for i in range(70)) + "".join(VALUE.format(i) for i in range(70)),
    "root ::= x x x\nx ::= [a-z] " + '"a"? ' * 10 + '| ""',
]
BAD = [
    ("", "no rule 'root'"),
    ('foo ::= "a"', "no rule 'root'"),
    ("root", "expected '::='"),
    ("root ::= foo", "'foo'"),
    ('root ::= "abc', "found the end"),
    ("root ::= [a-", "found the end"),
    ("root ::= []", "empty"),
    ('root ::= ("a"', r"expected '\)'"),
    ('root ::= "a")', "end of the line"),
    ('root ::= "\\q"', "escapes"),
    ('root ::= "\\U00110000"', "escapes"),
    ('root ::= "\0"', "NUL"),
    ('root ::= "\ud800"', "surrogate"),
    ("root ::= *", "nothing stands before"),
    ('root ::= "a"{5,2}', "not in order"),
    ('root ::= "a"{2001}', "2000"),
    ('root ::= "a"{0,9999999}', "bounds"),
    ('root ::= "a"\nroot ::= "b"', "twice"),
    ("root ::= <x", "<token>"),
    ('root ::= root "a" | "b"', "left-recursive"),
    ('root ::= a\na ::= b "x"\nb ::= a | "y"', "left-recursive"),
    ('root ::= x root "z" | "q"\nx ::= y\ny ::= "" | "q"', "left-recursive"),
    ("root ::= root", "left-recursive"),
    ("root ::= " + "(" * 100_000, "nested"),
    ("root ::= " + '"a"? ' * 17, "optional"),
    ('root ::= ("a"?){50} "b"', "optional"),
    ('root ::= ((("a"?){50}){50}){50}', "optional"),
    ('root ::= (("a"?){0,50}){0,50}', "optional"),
    ('root ::= ((("a"? "b"?){3}){3}){3}', "optional"),
    ('root ::= x{20}\nx ::= "a" | ""', "optional"),
    ("root ::= " + "|".join(["[a]"] * 513), "ways to go on"),
    ("root ::= " + f'"{"a" * 2000}"' + "{1000}", str(MAX_ELEMENTS)),
    ("root ::= " + " ".join(["(.)"] * 5000), "rules"),
    ("root ::= " + '"a"' * 100_000, "characters"),
    ("root ::= ([a-z]* [a-z]*)*", "ambiguous"),
    ('root ::= x{0,50}\nx ::= "b"+', "ambiguous"),
    ('root ::= ("b"+)* "!"', "ambiguous"),
    ('root ::= "x" y "z"\ny ::= ([a-z] | "b" | "bc")+', "ambiguous"),
    ("root ::= .* [^x]* [a-z]* [b-d]*", "ambiguous"),
    ("root ::= w w w w\nw ::= [ \\t]* | [\\n]", "ambiguous"),
    ("root ::= [a-z]{0,500} [a-z]{0,500} [a-z]{0,500}", "ambiguous"),
    ('root ::= "a" root "a" | "a"', "ambiguous"),
    ('root ::= x\nx ::= "a" x y | "a"\ny ::= "a" y x | "a"', "ambiguous"),
    # what stands beside it takes none of the work that finds it
    (PADDING.strip() + "\nroot ::= ([a-z]* [a-z]*)*", "ambiguous"),
    (PADDING.strip() + "\nroot ::= " + "".join(f"j{i} | " for i in range(120)) + "([a-z]* [a-z]*)*", "ambiguous"),
    ("root ::= (" + "".join(f"[\\x{code:02x}] | " for code in range(33, 90)) + "[a-z]* [a-z]*)*", "ambiguous"),
    *(
        (
            f'root ::= {both}\nd ::= (x | x){times}\nr ::= (x | y){times}\nx ::= [a-z] | "0"\ny ::= [a-z] | "0"',
            "ambiguous",
        )
        for both in ('"(" d ")" r', '"(" r ")" d')
        for times in ("+", "{0,90}")
    ),
    (PLENTY + "\nroot ::= j0", "too large"),
    ("root ::= w\nw ::= " + " | ".join(f'"{chr(0x4E00 + i)}" w "{i}"' for i in range(300)) + ' | "!"', "too large"),
]


@pytest.mark.parametrize("text", GOOD)
def test_a_good_grammar_passes(text: str) -> None:
    check_grammar(text)


@pytest.mark.parametrize(("text", "reason"), BAD, ids=range(len(BAD)))
def test_a_bad_grammar_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check_grammar(text)


def test_the_message_gives_line_and_column() -> None:
    with pytest.raises(InputError, match="line 2, column 9"):
        check_grammar('root ::= x\nx ::= "a\\q"')


def test_special_tokens_that_a_grammar_names_are_reported() -> None:
    checked = check_grammar("root ::= <[3]> !<[4]> <think> !</think>")
    assert checked.token_ids == (3, 4)
    assert checked.token_texts == ("<think>", "</think>")


@given(st.text(alphabet='rot:=a"[]()|*+?{},0129\\x-^.<>! \n#', max_size=60))
def test_any_text_passes_or_is_an_input_error(text: str) -> None:
    for grammar in (text, "root ::= " + text):
        with contextlib.suppress(InputError):
            check_grammar(grammar)
