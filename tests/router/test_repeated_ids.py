"""A request sent again under its id has the same answer, and nothing works for it twice."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run, virtual_loop
from router.answer import TextChunk, TextOptions, TextRequest
from router.http.answers import error_response
from router.text import TextService, seed_of
from tests.factories import SimCluster, prompt_of, sim_cluster
from tests.fake_model import VOCAB_SIZE
from tests.router.scripted import smollm
from workers.errors import ConflictError
from workers.request import SamplingParams, Terms

# Without a seed: the id is one.
SAMPLED = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
PROMPT = prompt_of(10)


def text_of(cluster: SimCluster) -> TextService:
    return TextService(cluster.router, smollm(), ["fake"], max_model_len=160, vocab_size=VOCAB_SIZE)


async def tokens(text: TextService, request: TextRequest, heard: list[TextChunk] | None = None) -> list[int]:
    heard = [] if heard is None else heard
    async with aclosing(text.stream(request)) as stream:
        async for chunk in stream:
            heard.append(chunk)
    return [token_id for chunk in heard for token_id in chunk.token_ids]


def ask(text: TextService, prompt: Any = PROMPT, params: Any = SAMPLED, tenant: Any = "") -> TextRequest:
    return text.prepare(prompt, params, "mine", TextOptions(terms=Terms(tenant)))


def test_a_retry_after_the_end_has_the_same_answer_and_another_tenants_is_another():
    async def main() -> None:
        async with sim_cluster() as cluster:
            text = text_of(cluster)
            first = await tokens(text, ask(text))
            assert await tokens(text, ask(text)) == first
            assert await tokens(text, ask(text, tenant="other")) != first

    run(main())
    assert seed_of("b", "a") != seed_of("ab", "")


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.02, 0.08])
def test_the_same_request_sent_again_while_it_runs_is_answered_there_and_the_first_ends(after_s):
    """Whether the first waits for a place, for token 1 or for a later one."""

    async def main() -> None:
        async with sim_cluster() as cluster:
            text = text_of(cluster)
            alone = await tokens(text, ask(text))
            heard: list[TextChunk] = []
            first = asyncio.create_task(tokens(text, ask(text), heard))
            await asyncio.sleep(after_s)
            second = asyncio.create_task(tokens(text, ask(text)))
            began = virtual_loop().time()
            with pytest.raises(ConflictError, match="the same request came again"):
                await first
            assert virtual_loop().time() - began < 0.02
            assert await second == alone
            said = [token_id for chunk in heard for token_id in chunk.token_ids]
            assert said == alone[: len(said)]
            assert (after_s < 0.02) == (said == [])

    run(main())


def test_a_request_that_waits_for_room_gives_up_its_place_in_the_queue():
    async def main() -> None:
        async with sim_cluster() as cluster:
            text = text_of(cluster)
            # More than two steps' worth of tokens: nobody else gets to the prefill worker now.
            others = asyncio.create_task(cluster.ask(prompt_of(100), replace(SAMPLED, seed=1), "other"))
            await asyncio.sleep(0.01)
            first = asyncio.create_task(tokens(text, ask(text, prompt_of(30))))
            await asyncio.sleep(0.01)
            assert cluster.router.num_queued == 1
            second = asyncio.create_task(tokens(text, ask(text, prompt_of(30))))
            with pytest.raises(ConflictError):
                await first
            assert (cluster.router.num_queued, others.done()) == (1, False)
            await asyncio.gather(others, second)

    run(main())


@pytest.mark.parametrize("other", ["prompt", "params", "tenant"])
def test_another_request_of_the_same_id_disturbs_nobody(other):
    async def main() -> None:
        async with sim_cluster() as cluster:
            text = text_of(cluster)
            different = {"prompt": prompt_of(11), "params": replace(SAMPLED, top_k=5), "tenant": "another"}
            requests = [ask(text), ask(text, **{other: different[other]})]
            alone = [await tokens(text, request) for request in requests]
            assert await asyncio.gather(*(tokens(text, request) for request in requests)) == alone

    run(main())


def test_whoever_was_taken_over_is_told_not_to_send_it_yet_again():
    response = error_response(ConflictError("the same request came again"))
    # openai-python's clients repeat a 409 by themselves, unless told.
    assert (response.status_code, response.headers["x-should-retry"]) == (409, "false")
