from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from router.answer import TextChunk, TextOptions
from router.text import Prompt, TextService, seed_of
from tests.router.scripted import HANG, TIMELINE, ScriptedRouter, smollm, text_service, words
from workers.errors import AbortedError, FrameError, KVFerryError, NotFoundError, UnavailableError
from workers.request import FinishReason, SamplingParams, TokenOutput

GREEDY = SamplingParams(temperature=0.0)


def answer(
    text: TextService, prompt: Prompt = "Hi", params: SamplingParams = GREEDY, stops: Sequence[str] = (), **options: Any
) -> list[TextChunk]:
    async def run() -> list[TextChunk]:
        async with aclosing(text.complete(prompt, params, "r1", TextOptions(tuple(stops), **options))) as chunks:
            return [chunk async for chunk in chunks]

    return asyncio.run(run())


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
    chat = [{"role": "user", "content": "Hi"}]
    answer(text_service(router), chat)
    assert smollm().decode(router.calls[0][0], skip_special_tokens=False) == smollm().apply_chat_template(chat)


def test_models_have_names():
    text = text_service(ScriptedRouter([]))
    assert [text.model_name(name) for name in (None, "", "smol", "alias/smol")] == ["smol"] * 3 + ["alias/smol"]
    with pytest.raises(NotFoundError, match="model 'gpt-9' does not exist here; served: smol, alias/smol"):
        text.model_name("gpt-9")


def test_special_tokens_are_shown_where_asked_for():
    ids = smollm().encode("<|im_start|>user")
    for skip, text in ((True, "user"), (False, "<|im_start|>user")):
        chunks = answer(text_service(ScriptedRouter([[one] for one in ids])), skip_special_tokens=skip)
        assert "".join(chunk.text for chunk in chunks) == text


def test_cached_tokens_and_salts_pass_through():
    router = ScriptedRouter(words(" one two"), num_cached_tokens=3)
    chunks = answer(text_service(router), cache_salt="mine")
    assert [chunk.num_cached_tokens for chunk in chunks] == [0, 3]
    assert router.salts == ["mine"]


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
