from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.answer import TextChunk, TextOptions
from router.merge import merge
from router.stop_strings import StopStrings
from router.text import Prompt, TextService, seed_of
from tests.router.scripted import HANG, TIMELINE, ScriptedRouter, smollm, text_service, words
from workers.chat_template import Chat
from workers.errors import AbortedError, FrameError, InvalidRequestError, KVFerryError, NotFoundError, UnavailableError
from workers.request import FinishReason, SamplingParams, TokenOutput

GREEDY = SamplingParams(temperature=0.0)


def answer(
    text: TextService, prompt: Prompt = "Hi", params: SamplingParams = GREEDY, stops: Sequence[str] = (), **options: Any
) -> list[TextChunk]:
    async def run() -> list[TextChunk]:
        async with aclosing(text.complete(prompt, params, "r1", TextOptions(tuple(stops), **options))) as chunks:
            return [chunk async for chunk in chunks]

    return asyncio.run(run())


def refusal(prompt: Prompt = "Hi", params: SamplingParams = GREEDY, **how: Any) -> InvalidRequestError:
    """The error of a request that must not reach the router."""
    router = ScriptedRouter(words("never"))
    with pytest.raises(InvalidRequestError) as raised:
        answer(text_service(router), prompt, params, **how)
    assert not router.calls
    assert "\n" not in raised.value.message
    return raised.value


def test_pieces_usage_and_times():
    router = ScriptedRouter(words(" one two 🤗"))
    chunks = answer(text_service(router), "Say it")
    assert "".join(chunk.text for chunk in chunks) == " one two 🤗"
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert all(chunk.finish_reason is None and chunk.num_prompt_tokens == 0 for chunk in chunks[:-1])
    last = chunks[-1]
    assert (last.finish_reason, last.timeline) == (FinishReason.LENGTH, TIMELINE)
    assert (last.num_prompt_tokens, last.num_completion_tokens) == (len(smollm().encode("Say it")), len(chunks))
    assert min(last.ttft_s, last.tpot_s) > 0
    assert router.aborted == []


def test_half_a_character_is_held_back_and_shown_at_the_end():
    ids = smollm().encode("🤗")
    assert len(ids) > 1
    chunks = answer(text_service(ScriptedRouter([[token_id] for token_id in ids])))
    assert [chunk.text for chunk in chunks] == [""] * (len(ids) - 1) + ["🤗"]
    cut = answer(text_service(ScriptedRouter([[token_id] for token_id in ids[:-1]])))
    assert "".join(chunk.text for chunk in cut) == smollm().decode(ids[:-1]) == "\ufffd"


def test_the_token_that_stops_is_counted_and_not_shown():
    [*_, last] = answer(text_service(ScriptedRouter([*words(" a"), words(" b")[0]], FinishReason.STOP)))
    assert (last.text, last.num_completion_tokens, last.finish_reason) == ("", 2, FinishReason.STOP)


def test_the_router_gets_complete_params():
    router = ScriptedRouter(words("x"))
    prompt = smollm().encode("Hi")
    params = SamplingParams(temperature=1e-9, top_k=-1, seed=-1)
    answer(text_service(router), prompt, params)
    answer(text_service(router), prompt, SamplingParams(max_tokens=3, stop_token_ids=(7,)))
    (_, first, _), (ids, second, request_id) = router.calls
    assert first == SamplingParams(temperature=0.0, top_k=0, seed=2**64 - 1, max_tokens=64 - len(prompt))
    assert (ids, request_id) == (prompt, "r1")
    assert second == SamplingParams(max_tokens=3, stop_token_ids=(7,), seed=seed_of("r1"))


def test_the_seed_is_a_function_of_the_request_id():
    assert seed_of("a") == seed_of("a") != seed_of("b")
    assert seed_of("a", "tenant") != seed_of("a")


def test_chats_are_rendered_with_the_models_template():
    router = ScriptedRouter(words("x"))
    chat = Chat([{"role": "user", "content": "Hi"}])
    answer(text_service(router), chat)
    assert smollm().decode(router.calls[0][0], skip_special_tokens=False) == smollm().apply_chat_template(chat)


def test_prompts_that_cannot_be_served_are_refused():
    assert (refusal("").param, refusal([]).message) == ("prompt", "prompt is empty; give at least one token")
    assert refusal([1, 49152]).message == "prompt[1] is token id 49152; the model's ids are 0 to 49151"
    assert refusal([-1]).param == "prompt"
    for long in (" a" * 64, [5] * 64, "a" * 10_000, Chat([{"role": "user", "content": " a" * 80}])):
        error = refusal(long)
        assert error.code == "context_length_exceeded"
        assert error.message.startswith("This model's maximum context length is 64 tokens; ")
    assert refusal(Chat([{"role": "user", "content": " a" * 80}])).param == "messages"
    assert refusal(Chat([{"role": "oracle", "content": "?"}])).message.startswith(
        "messages[0].role is 'oracle'; supported:"
    )
    assert refusal(Chat([{"role": "user", "content": "\ud800"}])).param == "messages"


def test_a_prompt_and_its_answer_must_fit_together():
    router = ScriptedRouter(words("x"))
    answer(text_service(router), [5] * 60, replace(GREEDY, max_tokens=4))
    assert router.calls[0][1].max_tokens == 4
    error = refusal([5] * 60, replace(GREEDY, max_tokens=5))
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert "lower max_tokens to 4" in error.message


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf]),
        ("top_p", [0.0, -1.0, 1.1, math.nan]),
        ("top_k", [-2, 2**31]),
        ("max_tokens", [0, -5]),
        ("seed", [2**64, -(2**63) - 1]),
        ("stop_token_ids", [(49152,), (-1,)]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0.0, -1.0, math.inf, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.inf]),
        ("logit_bias", [((49152, 1.0),), ((-1, 1.0),), ((5, 100.5),), ((5, -math.inf),), ((5, math.nan),)]),
        ("min_tokens", [-1, 64, 2**40]),
        ("logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
        ("n", [-1, 0, 129]),
    ],
)
def test_sampling_params_out_of_range_are_refused(field: str, values: list[Any]):
    for value in values:
        assert refusal(params=replace(GREEDY, **{field: value})).param == field


def test_the_ends_of_the_ranges_are_allowed():
    for changes in (
        {"min_p": 1.0, "repetition_penalty": 1e-9, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"min_p": 0.0, "repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logit_bias": ((0, -100.0), (49151, 100.0)), "min_tokens": 5, "max_tokens": 5},
        {"logprobs": 0, "prompt_logprobs": 20, "min_tokens": 63, "n": 128},
    ):
        router = ScriptedRouter(words("x"))
        answer(text_service(router), params=replace(GREEDY, **changes))
        assert [getattr(router.calls[0][1], name) for name in changes] == list(changes.values())


def test_refusals_say_what_is_allowed():
    assert refusal(params=replace(GREEDY, min_tokens=6, max_tokens=5)).message == (
        "min_tokens is 6; it must be 0 to max_tokens (5)"
    )
    assert refusal(params=replace(GREEDY, logit_bias=((5, 101.0),))).message == (
        "logit_bias is 101.0 for token 5; it must be -100 to 100"
    )
    assert refusal(params=replace(GREEDY, presence_penalty=3.0)).message == (
        "presence_penalty is 3.0; it must be -2 to 2 (0 changes nothing)"
    )
    assert refusal(cache_salt="\ud800").param == refusal(cache_salt="x" * 513).param == "cache_salt"


def test_stops_and_request_ids_are_checked():
    assert refusal(stops=["a"] * 5).param == refusal(stops=[""]).param == "stop"
    text = text_service(ScriptedRouter(words("x")))

    async def prepare(request_id: str) -> None:
        text.prepare("Hi", GREEDY, request_id)

    for request_id in ("", "a b", "é", "x" * 129):
        with pytest.raises(InvalidRequestError, match="visible ASCII"):
            asyncio.run(prepare(request_id))


def test_models_have_names():
    text = text_service(ScriptedRouter([]))
    assert [text.model_name(name) for name in (None, "", "smol", "alias/smol")] == ["smol"] * 3 + ["alias/smol"]
    with pytest.raises(NotFoundError, match="model 'gpt-9' does not exist here; served: smol, alias/smol"):
        text.model_name("gpt-9")


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


def test_special_tokens_are_shown_where_asked_for():
    ids = smollm().encode("<|im_start|>user")
    for skip, text in ((True, "user"), (False, "<|im_start|>user")):
        chunks = answer(text_service(ScriptedRouter([[one] for one in ids])), skip_special_tokens=skip)
        assert "".join(chunk.text for chunk in chunks) == text


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


def test_cached_tokens_and_salts_pass_through():
    router = ScriptedRouter(words(" one two"), num_cached_tokens=3)
    chunks = answer(text_service(router), cache_salt="mine")
    assert [chunk.num_cached_tokens for chunk in chunks] == [0, 3]
    assert router.salts == ["mine"]


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


def test_errors_keep_their_type():
    text = text_service(ScriptedRouter([*words(" a"), UnavailableError("no decode worker answers; wait")]))
    with pytest.raises(UnavailableError, match="no decode worker"):
        answer(text)
    assert b'kvferry_request_errors_total{model_name="smol",type="UnavailableError"} 1.0' in text.metrics.exposition()


class OneOutput(ScriptedRouter):
    def __init__(self, output: TokenOutput) -> None:
        super().__init__([])
        self.output = output

    async def _play(self, request_id: str, n: int, so_far: Mapping[int, Sequence[int]]):
        yield self.output


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (TokenOutput("r1", 0, (), FinishReason.ERROR, None, "FrameError", "a frame is damaged"), FrameError),
        (TokenOutput("r1", 0, (), FinishReason.ABORTED), AbortedError),
        (TokenOutput("r1", 1, (5,), FinishReason.LENGTH), KVFerryError),
        (TokenOutput("r1", 0, (5,)), KVFerryError),
    ],
)
def test_outputs_that_are_no_success_are_errors(output: TokenOutput, error: type[KVFerryError]):
    with pytest.raises(error):
        answer(text_service(OneOutput(output)))


def test_closing_an_answer_aborts_it_at_once():
    router = ScriptedRouter([*words(" a b"), HANG])
    text = text_service(router)

    async def run() -> None:
        chunks = text.complete("Hi", GREEDY, "r1")
        await anext(chunks)
        await chunks.aclose()
        assert router.aborted == ["r1"]

    asyncio.run(run())
    assert b'finished_reason="abort",model_name="smol"} 1.0' in text.metrics.exposition()


def test_a_request_id_in_use_is_made_unique_for_the_workers():
    router = ScriptedRouter([*words(" a"), HANG])
    text = text_service(router)

    async def run() -> None:
        first, second = text.complete("Hi", GREEDY, "same"), text.complete("Hi", GREEDY, "same")
        await anext(first)
        await anext(second)
        await first.aclose()
        await second.aclose()

    asyncio.run(run())
    (_, one, id_one), (_, two, id_two) = router.calls
    assert (id_one, id_two[:5]) == ("same", "same.")
    assert one.seed == two.seed


def test_merge_ends_all_streams_with_the_first_failure():
    closed: list[int] = []

    async def stream(index: int):
        try:
            for item in range(3):
                yield item
                await asyncio.sleep(0)
            if index == 1:
                raise UnavailableError("gone")
            await asyncio.Event().wait()
        finally:
            closed.append(index)

    got: list[tuple[int, int]] = []

    async def run() -> None:
        async for item in merge([stream(0), stream(1), stream(2)]):
            got.append(item)  # noqa: PERF401  What came before the failure is wanted too.

    with pytest.raises(UnavailableError):
        asyncio.run(run())
    assert sorted(got) == [(index, item) for index in range(3) for item in range(3)]
    assert sorted(closed) == [0, 1, 2]


def test_closing_a_merge_whose_reader_is_slow_closes_all_streams():
    closed: list[int] = []

    async def stream(index: int):
        try:
            while True:
                yield index
        finally:
            closed.append(index)

    async def run() -> None:
        merged = merge([stream(0), stream(1)])
        await anext(merged)
        await asyncio.sleep(0.01)
        await asyncio.wait_for(merged.aclose(), 1)

    asyncio.run(run())
    assert sorted(closed) == [0, 1]
