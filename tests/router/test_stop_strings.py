"""Stop strings: where an answer is cut, what is shown and what is counted."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from router.stop_strings import StopStrings
from tests.router.scripted import HANG, ScriptedRouter, smollm, text_service, words
from tests.router.test_text import GREEDY, answer
from workers.request import FinishReason


def test_a_stop_string_cuts_counts_and_aborts():
    router = ScriptedRouter([smollm().encode(" one two"), *words(" three STOP here"), HANG])
    chunks = answer(text_service(router), stops=["x y", "STOP"])
    assert "".join(chunk.text for chunk in chunks) == " one two three "
    upto = len(smollm().encode(" one two")) + len(smollm().encode(" three STOP"))
    assert (chunks[-1].finish_reason, chunks[-1].num_completion_tokens) == (FinishReason.STOP, upto)
    assert sum(len(chunk.token_ids) for chunk in chunks) == upto
    assert router.aborted == ["r1"]


def test_choices_end_each_at_its_own_stop_string_and_the_last_of_them_aborts():
    router = ScriptedRouter([*words(" one two STOP " + 9 * " more"), HANG], others=[words(" a b c d STOP e f g")])
    params = replace(GREEDY, n=2)
    chunks = answer(text_service(router), params=params, stops=["STOP"])
    for choice, text in ((0, " one two "), (1, " a b c d ")):
        own = [chunk for chunk in chunks if chunk.choice == choice]
        assert "".join(chunk.text for chunk in own) == text
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [FinishReason.STOP]
        assert own[-1].num_completion_tokens == sum(len(chunk.token_ids) for chunk in own)
    assert router.aborted == ["r1"]


def test_a_stop_string_inside_one_message_of_many_tokens():
    ids = smollm().encode(" alpha beta gamma delta")
    chunks = answer(text_service(ScriptedRouter([ids, HANG])), stops=["beta"])
    assert ("".join(chunk.text for chunk in chunks), chunks[-1].num_completion_tokens) == (" alpha ", 2)


def test_the_stop_string_or_token_is_shown_where_asked_for():
    text = text_service(ScriptedRouter([*words(" one two STOPPED"), HANG]))
    chunks = answer(text, stops=["STOP"], include_stop_str_in_output=True)
    assert "".join(chunk.text for chunk in chunks) == " one two STOP"
    shown = answer(text_service(ScriptedRouter(words(" a b"), FinishReason.STOP)), include_stop_str_in_output=True)
    assert "".join(chunk.text for chunk in shown) == " a b"


def test_stop_strings_wait_for_min_tokens():
    cases = {0: "a", 1: "a", 2: "a b a", 3: "a b a", 4: "a b a b a", 5: "a b a b a", 6: "a b a b a b"}
    for min_tokens, shown in cases.items():
        router = ScriptedRouter(words("a b a b a b"))
        chunks = answer(text_service(router), params=replace(GREEDY, min_tokens=min_tokens), stops=[" b"])
        assert "".join(chunk.text for chunk in chunks) == shown
        assert chunks[-1].finish_reason is (FinishReason.LENGTH if min_tokens == 6 else FinishReason.STOP)
        assert chunks[-1].num_completion_tokens == min(6, len(smollm().encode(shown)) + 1)


def test_logprobs_end_with_the_token_that_completes_a_stop_string():
    ids = smollm().encode(" alpha beta gamma delta")
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    chunks = answer(text_service(ScriptedRouter([ids, HANG])), [5, 6, 7], params, stops=["beta"])
    assert [one.token_id for chunk in chunks for one in chunk.logprobs] == ids[:2]
    assert [one.token_id for one in chunks[0].prompt_logprobs] == [6, 7]


def test_what_only_looked_like_a_stop_string_is_shown():
    chunks = answer(text_service(ScriptedRouter(words(" one two thr"))), stops=["two three"])
    assert "".join(chunk.text for chunk in chunks) == " one two thr"
    assert chunks[-1].finish_reason is FinishReason.LENGTH


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_stop_strings_agree_with_a_search_of_the_whole_text(text: str, stops: list[str], data: st.DataObject):
    include, deaf = data.draw(st.booleans()), data.draw(st.integers(0, 8))
    matcher, shown, at = StopStrings(stops, include), "", 0
    while at < len(text) and not matcher.matched:
        step = data.draw(st.integers(1, 3))
        shown += matcher.push(text[at : at + step], may_match=at >= deaf)
        deaf = max(deaf, at + step) if at < deaf else deaf
        at += step
    shown += matcher.flush()
    read = text[:at]
    # What ends in the text that could not match is no match.
    ends = [(s, s + len(stop)) for stop in stops for s in range(len(read)) if read.startswith(stop, s)]
    matches = [(start, end) for start, end in ends if end > deaf]
    assert matcher.matched == bool(matches)
    assert shown == (read[: min(matches)[1 if include else 0]] if matches else read)
