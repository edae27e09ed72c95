"""Calls of tools in text: every form, however the text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.tool_calls import Piece, ToolCallParser
from router.openai.tool_syntax import CONSTRAINED, ToolSyntax, tool_syntax

ARGUMENTS = {"city": 'a "b" \\ {c} ]}', "at": [1, {"x": None}], "é": "ö"}
CALL = json.dumps({"name": "weather", "arguments": ARGUMENTS})
NONE: dict[str, Any] = {}


def syntax(name: Any) -> ToolSyntax:
    found = CONSTRAINED if name == "json" else tool_syntax(name, None)
    assert found is not None
    return found


def read(parser: ToolCallParser, parts: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls, their arguments read."""
    pieces: list[Piece] = [piece for part in parts for piece in parser.push(part)]
    pieces += parser.flush()
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.name is not None:
            assert piece.call == len(calls)
            calls.append([piece.name, ""])
        if piece.call is not None:
            assert piece.call == len(calls) - 1
            calls[-1][1] += piece.text
    text = "".join(piece.text for piece in pieces if piece.call is None)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


ONE = ("weather", ARGUMENTS)
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [ONE]),
    ("hermes", f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", "I look.", [ONE, ONE]),
    ("hermes", f"<tool_call>{CALL}</tool_call> done", " done", [ONE]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", NONE)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", NONE)]),
    ("hermes", "1 < 2 and <tool_cal", "1 < 2 and <tool_cal", []),
    ("hermes", "So <tool_call> </tool_call>", "So <tool_call> </tool_call>", []),
    ("hermes", "<tool_call>none</tool_call>", "<tool_call>none</tool_call>", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", "<tool_call>{nonsense}", "<tool_call>{nonsense}", []),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", "just text \n", "just text \n", []),
    ("hermes", CALL, CALL, []),
    ("llama3_json", json.dumps({"name": "weather", "parameters": ARGUMENTS}), "", [ONE]),
    ("llama3_json", f"<|python_tag|>{CALL}; {CALL}", "", [ONE, ONE]),
    ("llama3_json", '{"answer": 1}', '{"answer": 1}', []),
    ("llama3_json", "[1, 2]", "[1, 2]", []),
    ("llama3_json", f"Text {CALL}", f"Text {CALL}", []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [ONE, ONE]),
    ("mistral", f"Well. [TOOL_CALLS][{CALL}]", "Well.", [ONE]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{json.dumps(ARGUMENTS)}[TOOL_CALLS]f{{}}", "", [ONE, ("f", NONE)]),
    ("mistral", "[TOOL_CALLS] Hello you", "[TOOL_CALLS] Hello you", []),
    ("mistral", "[TOOL_CALLS]f[ARG", "[TOOL_CALLS]f[ARG", []),
    ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}</tool_call>", "", [ONE, ONE]),
    ("mistral", "a [b] c", "a [b] c", []),
    ("json", f"[{CALL}, {CALL}]", "", [ONE, ONE]),
    ("pythonic", "[f(a=1, b='x'), g.h(c=[True, None])]", "", [("f", {"a": 1, "b": "x"}), ("g.h", {"c": [True, None]})]),
    ("pythonic", "[]", "[]", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[f(a=1)", "[f(a=1)", []),
    ("pythonic", "[f(a=__import__('os'))]", "[f(a=__import__('os'))]", []),
    *(
        ("pythonic", odd, odd, [])
        for odd in ("[f(a=b'')]", "[f(a={1})]", "[f(a=1j)]", "[f(a=1e999)]", "[f(**{})]", "[" * 9999)
    ),
    ("hermes", '<tool_call>{"name": "f\\u0031", "arguments": {}}</tool_call>', "", [("f1", NONE)]),
    ("hermes", r'<tool_call>{"name": "f\x", "arguments": {}}', r'<tool_call>{"name": "f\x", "arguments": {}}', []),
    ("pythonic", "I say [f(a=1)]", "I say [f(a=1)]", []),
]


@pytest.mark.parametrize(("name", "answer", "text", "calls"), CASES)
def test_an_answer_is_its_text_and_its_calls(name: str, answer: str, text: str, calls: list[Any]):
    assert read(syntax(name).parser(), [answer]) == (text, calls)
    assert read(syntax(name).parser(), list(answer)) == (text, calls)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200)))
def test_it_does_not_matter_where_the_text_is_cut(case: tuple[str, str, str, list[Any]], cuts: list[int]):
    name, answer, text, calls = case
    edges = [0, *sorted(cut % (len(answer) + 1) for cut in cuts), len(answer)]
    parts = [answer[start:end] for start, end in itertools.pairwise(edges)]
    assert read(syntax(name).parser(), parts) == (text, calls)


FRAGMENTS = [
    "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<|python_tag|>", "[ARGS]", "[TOOL", "<", "f", "x(a=1)", " ", "\n",
    ";", ",", ":",
    "{", "}", "[", "]", "\\", '"', '"name"', '"arguments"', "{}", '{"a": 1}', '{"name": "f", "arguments": {"a": 1}}',
]  # fmt: skip


def pieces_of(name: str, parts: list[str]) -> tuple[str, dict[int, list[str]]]:
    """Text; by call its name and arguments, as they are."""
    parser = syntax(name).parser()
    text, calls = "", dict[int, list[str]]()
    for piece in [piece for part in parts for piece in parser.push(part)] + list(parser.flush()):
        if piece.call is None:
            text += piece.text
        else:
            calls.setdefault(piece.call, [piece.name or "", ""])[1] += piece.text
    return text, calls


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join))
def test_whatever_a_model_says_cuts_change_nothing_and_what_is_no_call_is_text(said: str):
    for name in ("hermes", "llama3_json", "mistral", "json", "pythonic"):
        text, calls = pieces_of(name, [said])
        assert pieces_of(name, list(said)) == (text, calls)
        assert calls or text == said


def test_arguments_are_passed_on_before_they_are_whole():
    parser = syntax("hermes").parser()
    first = list(parser.push('<tool_call>{"name": "f", "arguments": {"text": "long'))
    assert first == [Piece('{"text": "long', 0, "f")]
    assert list(parser.push(" and")) == [Piece(" and", 0)]
    assert list(parser.push('"}}</tool_call>')) == [Piece('"}', 0)]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}{{ tools }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}{{ tools }}", "mistral"),
        ("{{ '[func_name1(params_name1=params_value1' }}{{ tools }}", "pythonic"),
        ('{{ tools }} {"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_form_is_known_by_the_template(template: str, name: Any):
    assert tool_syntax("auto", template) is tool_syntax(name, None)


def test_a_form_that_is_not_known_is_no_guess():
    assert tool_syntax("auto", "{{ tools }}") is None
