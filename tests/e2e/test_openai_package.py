"""OpenAI's own Python package, unchanged, against 1P1D of real processes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails

from cluster.client import Client
from tests.e2e.clusters import Running, is_free, wait_until
from tests.prompts import chat, questions, token_ids

pytestmark = pytest.mark.ray

QUESTION = questions(1)[0]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "stream": True}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


def expected(running: Running, prompt: Any) -> tuple[str, CompletionUsage]:
    """The answer to the same request by the native API, which test_same_tokens compares with transformers."""
    with Client(running.grpc) as client:
        completion = client.generate(prompt, temperature=0.0, max_tokens=12)
    counts = completion.usage
    return completion.text, CompletionUsage(
        prompt_tokens=counts.num_prompt_tokens,
        completion_tokens=counts.num_completion_tokens,
        total_tokens=counts.num_prompt_tokens + counts.num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.num_cached_tokens),
    )


def test_it_streams_a_chat(one_p_one_d: Running):
    with openai.OpenAI(base_url=f"{one_p_one_d.http}/v1", api_key="none", max_retries=0) as api:
        model = api.models.list().data[0].id
        messages: Any = chat(QUESTION)
        *chunks, last = api.chat.completions.create(model=model, messages=messages, **GREEDY, **USAGE)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    # In pieces as they come: more than a few events for twelve tokens.
    assert len(chunks) > 6
    assert (text, last.usage) == expected(one_p_one_d, chat(QUESTION))
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(token_ids(QUESTION))


def test_it_streams_a_chat_and_completions_asynchronously(one_p_one_d: Running):
    prompts = [QUESTION, token_ids(QUESTION)]
    messages: Any = chat(QUESTION)

    async def run() -> list[tuple[str, Any]]:
        async with openai.AsyncOpenAI(base_url=f"{one_p_one_d.http}/v1", api_key="none", max_retries=0) as api:
            model = (await api.models.list()).data[0].id

            async def completion(prompt: Any) -> tuple[str, Any]:
                stream: Any = await api.completions.create(model=model, prompt=prompt, **GREEDY, **USAGE)
                *chunks, last = [chunk async for chunk in stream]
                return "".join(chunk.choices[0].text for chunk in chunks), last.usage

            async def chat_completion() -> tuple[str, Any]:
                stream: Any = await api.chat.completions.create(model=model, messages=messages, **GREEDY, **USAGE)
                *chunks, last = [chunk async for chunk in stream]
                return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), last.usage

            return await asyncio.gather(*map(completion, prompts), chat_completion())

    answers = asyncio.run(run())
    assert answers == [expected(one_p_one_d, prompt) for prompt in (*prompts, chat(QUESTION))]


def test_32_requests_at_once_finish_and_leave_nothing(one_p_one_d: Running):
    async def run() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{one_p_one_d.http}/v1", api_key="none", max_retries=0) as api:
            model = (await api.models.list()).data[0].id

            async def one(i: int) -> int:
                stream: Any = await api.completions.create(
                    model=model, prompt=f"{i} and {i} make", extra_body={"ignore_eos": True}, **GREEDY, **USAGE
                )
                chunks = [chunk async for chunk in stream]
                assert chunks[-2].choices[0].finish_reason == "length"
                num_tokens: int = chunks[-1].usage.completion_tokens
                return num_tokens

            return await asyncio.gather(*map(one, range(32)))

    assert asyncio.run(run()) == [12] * 32
    stats = one_p_one_d.when_free(5)
    assert stats["decode"].max_num_running > 1
    assert stats["decode"].num_prompt_tokens_computed == 0

    # The router's own picture follows with its next heartbeat.
    wait_until(one_p_one_d.status, lambda status: all(is_free(worker.stats) for worker in status.workers), 3)
    shown = one_p_one_d.cluster.kvferry("status", "--name", one_p_one_d.cluster.name, "--json")
    status = json.loads(shown.stdout)
    assert {worker["role"] for worker in status["workers"]} == {"prefill", "decode"}
    for worker in status["workers"]:
        taken = ("blocks_reserved", "blocks_in_use", "blocks_quarantined", "num_running", "num_waiting")
        assert {name: worker[name] for name in taken} == dict.fromkeys(taken, 0)
        assert worker["blocks_free"] + worker["blocks_cached"] == worker["blocks_total"] > 0
    assert (status["totals"]["num_queued"], status["routers"][0]["num_running"]) == (0, 0)
