"""Real processes that are killed or stopped under streams, on the cluster that all tests share: it heals."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest

from cluster.client import AsyncClient, Chunk, Client, Completion, completion_of
from cluster.guard import start_time
from protos.router_pb2 import WORKER_STATE_READY
from protos.worker_pb2 import WorkerStats
from tests.e2e.clusters import Running, wait_until
from tests.exact import Comparator
from tests.prompts import chat, questions, token_ids, tokenizer
from workers.request import SamplingParams

pytestmark = pytest.mark.ray

QUESTION = questions(1)[0]
LONG = (token_ids(QUESTION) * 100)[:700]
# What the router needs to know of it, and what a busy machine takes beyond: `make bench-death` judges the 2.0 s.
STOP_KNOWN_S = 2.0 + 0.5
# A worker is silent for 10 s before it is ended, and another has to load the model.
HEAL_S = 60.0


def of_role(running: Running, role: str) -> WorkerStats | None:
    """None: the router cannot reach it now."""
    states = {worker.stats.role: worker for worker in running.status().workers}
    return states[role].stats if states[role].state == WORKER_STATE_READY else None


def test_a_killed_router_costs_our_client_nothing_and_an_openai_client_a_retry(
    one_p_one_d: Running, comparator: Comparator
):
    params: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "max_tokens": 40}
    before = one_p_one_d.status().routers[0]

    async def ours(client: AsyncClient, killed: asyncio.Event) -> list[Chunk]:
        chunks = []
        stream: AsyncGenerator[Chunk] = client.stream(chat(QUESTION), **params, n=2, logprobs=1)
        async with aclosing(stream):
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 20:
                    os.kill(before.pid, signal.SIGKILL)
                    killed.set()
        return chunks

    async def openais(killed: asyncio.Event) -> str:
        async with openai.AsyncOpenAI(base_url=f"{one_p_one_d.http}/v1", api_key="none", max_retries=8) as api:
            asked: dict[str, Any] = {"model": "", "messages": chat(QUESTION), "temperature": 0, "max_tokens": 80}
            stream = await api.chat.completions.create(**asked, stream=True)
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError, openai.APIConnectionError)):
                [chunk async for chunk in stream]
            assert killed.is_set()
            answer = await api.chat.completions.create(**asked | {"max_tokens": 4})
            return answer.choices[0].message.content or ""

    async def both() -> tuple[list[Chunk], str]:
        killed = asyncio.Event()
        async with AsyncClient(one_p_one_d.grpc) as client:
            return await asyncio.gather(ours(client, killed), openais(killed))

    chunks, said = asyncio.run(both())
    completion = completion_of(chunks)
    for index, choice in enumerate(completion.choices):
        comparator.require_same(token_ids(QUESTION), SamplingParams(**params), choice.token_ids, choice=index)
        assert choice.text == tokenizer().decode(choice.token_ids, skip_special_tokens=True)
        assert [one.token_id for one in choice.logprobs] == list(choice.token_ids)
        assert choice.usage.num_completion_tokens == len(choice.token_ids)
    assert said
    assert one_p_one_d.status().routers[0].incarnation != before.incarnation
    one_p_one_d.when_free(12)  # A lease, at most.


def test_a_stopped_decode_worker_is_gone_around_in_time_and_rejoins_when_it_wakes(one_p_one_d: Running):
    victim = one_p_one_d.stats()["decode"]
    with Client(one_p_one_d.grpc) as client:
        chunks = client.stream(token_ids(QUESTION), temperature=0, max_tokens=300, ignore_eos=True)
        for _ in range(5):
            next(chunks)
        stopped_s = time.monotonic()
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: of_role(one_p_one_d, "decode"), lambda stats: stats is None, STOP_KNOWN_S)
            next(chunks)
            assert time.monotonic() - stopped_s < STOP_KNOWN_S + 1.0
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        awake = wait_until(lambda: of_role(one_p_one_d, "decode"), lambda stats: stats is not None, 5)
        assert awake is not None
        assert awake.incarnation == victim.incarnation
        chunks.close()
    one_p_one_d.when_free(5)


def test_a_prompt_outlives_the_sleep_of_its_prefill_worker(one_p_one_d: Running):
    victim = one_p_one_d.stats()["prefill"]

    async def main() -> tuple[Completion, Completion]:
        async with AsyncClient(one_p_one_d.grpc) as client:
            asking = asyncio.create_task(client.generate(LONG, temperature=0, max_tokens=2))
            await asyncio.to_thread(wait_until, one_p_one_d.stats, lambda stats: stats["prefill"].num_running > 0, 5)
            os.kill(victim.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(2.5)
                assert not asking.done()
            finally:
                os.kill(victim.pid, signal.SIGCONT)
            return await asking, await client.generate(LONG, temperature=0, max_tokens=2)

    found, undisturbed = asyncio.run(main())
    assert found.token_ids == undisturbed.token_ids
    one_p_one_d.when_free(12)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_does_not_wake_up_is_replaced_where_it_was(one_p_one_d: Running, role: str):
    before = one_p_one_d.stats()
    with Client(one_p_one_d.grpc) as client:
        wanted = client.generate(token_ids(QUESTION), temperature=0, max_tokens=60, ignore_eos=True)
        chunks = client.stream(token_ids(QUESTION), temperature=0, max_tokens=60, ignore_eos=True)
        first = [next(chunks) for _ in range(5)]
        os.kill(before[role].pid, signal.SIGSTOP)
        found = completion_of([*first, *chunks])
        assert found.token_ids == wanted.token_ids
        assert client.generate(token_ids(QUESTION), temperature=0, max_tokens=4).token_ids == wanted.token_ids[:4]
    after = wait_until(lambda: of_role(one_p_one_d, role), lambda stats: stats is not None, HEAL_S)
    assert after is not None
    assert after.incarnation != before[role].incarnation
    assert start_time(before[role].pid) is None
    one_p_one_d.when_free(12)
