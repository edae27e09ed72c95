"""Masks against the definition: a token may follow when some word of the language goes on with it."""

from __future__ import annotations

import itertools
import sys
from functools import cache

import numpy as np
import pytest
from llguidance import LLMatcher

from router.structured import grammar_of
from tests.prompts import tokenizer
from workers.engine.grammar import Allowed, Grammars
from workers.errors import ConfigError, InvalidRequestError
from workers.request import NextToken, SamplingParams, TokensSoFar

REGEX = "(an|and|andy|böse |bäh) ?(1[0-3]|x{1,3})?"
WORDS = [
    head + space + tail
    for head, space, tail in itertools.product(
        ("an", "and", "andy", "böse ", "bäh"), ("", " "), ("", "10", "11", "12", "13", "x", "xx", "xxx")
    )
]
GRAMMAR = LLMatcher.grammar_from_regex(REGEX)


@cache
def grammars() -> Grammars:
    """Of a model with 40 more columns than its tokenizer has tokens."""
    return Grammars(tokenizer, tokenizer().vocab_size + 40, tokenizer().eos_token_ids)


def answer_of(token_ids: list[int], key: str, grammar: str) -> Allowed:
    sample = NextToken(SamplingParams(grammar=grammar), 5 + len(token_ids), 0, TokensSoFar((), tuple(token_ids)))
    return grammars().allowed(key, sample)


def allowed_after(token_ids: list[int], key: str = "r", grammar: str = GRAMMAR) -> set[int]:
    mask = answer_of(token_ids, key, grammar)
    assert isinstance(mask, np.ndarray)
    assert mask.shape == (tokenizer().vocab_size + 40,)
    return set(np.flatnonzero(mask).tolist())


def by_definition(token_ids: list[int]) -> set[int]:
    said = tokenizer().bytes_of(token_ids)
    rests = [word.encode()[len(said) :] for word in WORDS if word.encode().startswith(said)]
    # A special token's text is not what it says.
    tokens = {i: tokenizer().bytes_of([i]) for i in range(tokenizer().vocab_size)}
    going_on = {i for i, text in tokens.items() if text and any(rest.startswith(text) for rest in rests)}
    return going_on | (set(tokenizer().eos_token_ids) if b"" in rests else set())


@pytest.mark.parametrize("said", ["", "a", "and", "andy ", "b", "andy 1", "böse xx", "an xxx"])
def test_a_mask_allows_what_some_word_goes_on_with(said: str):
    token_ids = tokenizer().encode(said, add_special_tokens=False)
    assert allowed_after(token_ids) == by_definition(token_ids)


def test_where_only_one_text_can_follow_its_usual_tokens_do():
    said = tokenizer().encode("bö")
    [token_id] = allowed_after(said, "forced")
    assert token_id in by_definition(said)
    assert tokenizer().encode("böse ")[len(said)] == token_id


def test_a_token_may_end_within_a_character():
    first_byte = next(i for i in range(tokenizer().vocab_size) if tokenizer().token_bytes(i) == "ö".encode()[:1])
    token_ids = [*tokenizer().encode("b"), first_byte]
    assert allowed_after(token_ids) == by_definition(token_ids)


def test_drafts_may_be_wrong_and_are_taken_back():
    good, wrong = tokenizer().encode("and"), tokenizer().encode("zebra")
    for _ in range(2):
        assert allowed_after(good, "drafts") == by_definition(good)
        for num in range(1, len(wrong) + 1):
            assert allowed_after(good + wrong[:num], "drafts") == by_definition(good)
    longer = tokenizer().encode("andy 12")
    for token_ids in (longer, longer[:1], longer[:2], longer, []):
        assert allowed_after(token_ids, "drafts") == by_definition(token_ids)


def test_nothing_follows_eos_but_eos():
    ended = [*tokenizer().encode("andy"), *tokenizer().eos_token_ids]
    assert allowed_after(ended, "ended") == set(tokenizer().eos_token_ids)
    assert allowed_after(ended[:-1], "ended") == by_definition(ended[:-1])


def test_another_request_may_bear_the_same_id():
    assert allowed_after([], "same") == by_definition([])
    assert allowed_after([], "same", LLMatcher.grammar_from_regex("[0-9]")) == {
        tokenizer().encode(digit)[0] for digit in "0123456789"
    }


@pytest.mark.parametrize("grammar", ["no grammar", "start: /(/", '{"grammars": 3}'])
def test_what_is_no_grammar_is_a_typed_error(grammar: str):
    error = answer_of([], "bad", grammar)
    assert isinstance(error, InvalidRequestError)
    assert error.param == "grammar"


def test_what_the_vocabulary_cannot_say_is_a_typed_error_without_the_parsers_state():
    said = {tokenizer().token_bytes(i) for i in range(tokenizer().vocab_size)}
    unsaid = next(byte for byte in range(128) if bytes([byte]) not in said)
    error = answer_of([], "unsaid", LLMatcher.grammar_from_lark(f"start: /\\x{{{unsaid:x}}}/"))
    assert isinstance(error, InvalidRequestError)
    assert "<state>" not in error.message


def test_a_tokenizer_that_does_not_fit_the_model_ends_only_what_has_a_grammar():
    small = Grammars(tokenizer, 300, tokenizer().eos_token_ids)
    sample = NextToken(SamplingParams(grammar=GRAMMAR), 5, 0, TokensSoFar((), ()))
    assert isinstance(small.allowed("r", sample), ConfigError)


@pytest.mark.parametrize(
    "lark",
    [
        "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(4500)) + 'a4500: "x"',
        'start: A0\nB: "b"\n' + "".join(f"A{i}: {'B(' * 25}A{i + 1}{')' * 25}\n" for i in range(700)) + 'A700: "x"',
    ],
    ids=["rules", "brackets"],
)
def test_a_grammar_of_many_levels_is_followed(lark: str):
    """On a usual stack it ends the process."""
    sample = NextToken(SamplingParams(grammar=grammar_of("grammar", lark, "grammar")), 5, 0, TokensSoFar((), ()))
    beginning = grammars().begin(["deep"], [sample])
    assert beginning is not None
    assert isinstance(beginning.result()[0], np.ndarray)


def test_thousands_of_choices_may_begin_alike():
    choices = [f"{'a' * 3}{i}" for i in range(4000)]
    grammar = grammar_of("choice", choices, "choice")
    token_ids = tokenizer().encode(choices[1234])
    for num in range(len(token_ids)):
        assert token_ids[num] in allowed_after(token_ids[:num], "many", grammar)
    assert set(tokenizer().eos_token_ids) <= allowed_after(token_ids, "many", grammar)


def test_a_worker_without_llguidance_names_the_mend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    bare = Grammars(tokenizer, tokenizer().vocab_size, tokenizer().eos_token_ids)
    sample = NextToken(SamplingParams(grammar=GRAMMAR), 5, 0, TokensSoFar((), ()))
    error = bare.allowed("fresh", sample)
    assert isinstance(error, InvalidRequestError)
    assert "pip install 'kvferry[structured]'" in error.message
