"""What moved between the two processes of 1P1D, counted: all of the prompt's KV, none of its computation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import pytest

from cluster.client import AsyncClient
from protos.worker_pb2 import WorkerStats
from tests.e2e.clusters import Running
from tests.prompts import chat, questions, token_ids

pytestmark = pytest.mark.ray

# 2 x 30 layers x 3 KV heads x 64 x 4 bytes, in fp32.
TOKEN_BYTES = 46_080
_COUNTERS = (
    "kv_bytes_sent",
    "kv_bytes_received",
    "num_frames_sent",
    "num_frames_received",
    "num_frames_overlapped",
    "num_prompt_tokens_computed",
    "num_output_tokens",
)


def counts(stats: WorkerStats) -> dict[str, int]:
    return {name: getattr(stats, name) for name in _COUNTERS}


def generate(running: Running, prompts: Sequence[list[int]], max_tokens: int) -> dict[str, dict[str, int]]:
    """What each worker's counters gained by these prompts, one after another."""

    async def run() -> None:
        async with AsyncClient(running.grpc) as client:
            for prompt in prompts:
                await client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    before = {role: counts(stats) for role, stats in running.when_free(5).items()}
    asyncio.run(run())
    after = {role: counts(stats) for role, stats in running.when_free(5).items()}
    return {role: {name: after[role][name] - before[role][name] for name in _COUNTERS} for role in after}


def long_prompt(num_tokens: int) -> list[int]:
    text = [token for question in questions(40) for token in token_ids(question)]
    return (text * (num_tokens // len(text) + 1))[:num_tokens]


def test_decode_receives_exactly_the_prompts_kv_and_computes_none_of_it(one_p_one_d: Running):
    # One token, one short of a block, a block, one more, and a question.
    prompts = [long_prompt(n) for n in (1, 15, 16, 17)] + [token_ids(questions(1)[0])]
    num_prompt_tokens = sum(map(len, prompts))
    gained = generate(one_p_one_d, prompts, max_tokens=4)
    prefill, decode = gained["prefill"], gained["decode"]
    assert prefill["num_prompt_tokens_computed"] == num_prompt_tokens
    assert decode["num_prompt_tokens_computed"] == 0
    assert prefill["kv_bytes_sent"] == decode["kv_bytes_received"] == num_prompt_tokens * TOKEN_BYTES
    assert prefill["num_frames_sent"] == decode["num_frames_received"] >= len(prompts)
    # Token 1 is prefill's, the three others are decode's.
    assert (prefill["num_output_tokens"], decode["num_output_tokens"]) == (len(prompts), 3 * len(prompts))
    # Each fits one step, so nothing could leave before its last chunk was computed.
    assert prefill["num_frames_overlapped"] == 0


def test_a_long_prompts_kv_leaves_while_the_rest_is_computed(one_p_one_d: Running):
    step = one_p_one_d.stats()["prefill"].max_num_batched_tokens
    prompt = long_prompt(2 * step + 7)
    gained = generate(one_p_one_d, [prompt], max_tokens=2)
    prefill, decode = gained["prefill"], gained["decode"]
    assert decode["kv_bytes_received"] == len(prompt) * TOKEN_BYTES
    assert 0 < prefill["num_frames_overlapped"] < prefill["num_frames_sent"]


def test_what_token_1_finishes_moves_nothing_to_the_decode_worker_s_batch(one_p_one_d: Running):
    gained = generate(one_p_one_d, [token_ids(questions(1)[0])], max_tokens=1)
    assert gained["prefill"]["num_output_tokens"] == 1
    assert gained["decode"]["num_output_tokens"] == 0


def test_a_late_request_gets_its_second_token_before_any_other_ends(one_p_one_d: Running):
    async def run() -> None:
        async with AsyncClient(one_p_one_d.grpc) as client:
            counted = [0] * 4
            ended: list[int] = []

            async def follow(i: int) -> None:
                question = chat(questions(4)[i])
                async for chunk in client.stream(question, max_tokens=96, temperature=0.0, ignore_eos=True):
                    counted[i] += len(chunk.token_ids)
                ended.append(i)

            early = [asyncio.create_task(follow(i)) for i in range(4)]
            async with asyncio.timeout(30):
                while min(counted) < 3:  # noqa: ASYNC110  What is waited for is the cluster's doing.
                    await asyncio.sleep(0.005)
            num_tokens = 0
            async for chunk in client.stream(chat(questions(5)[4]), max_tokens=8, temperature=0.0, ignore_eos=True):
                num_tokens += len(chunk.token_ids)
                if num_tokens >= 2:
                    break
            assert not ended
            assert max(counted) < 96
            await asyncio.gather(*early)
            assert counted == [96] * 4

    asyncio.run(run())
    one_p_one_d.when_free(5)


def test_prefill_and_decode_are_processes_of_their_own_on_cores_of_their_own(one_p_one_d: Running):
    stats = one_p_one_d.stats()
    pids = {role: worker.pid for role, worker in stats.items()}
    router = one_p_one_d.status().routers[0].pid
    assert len({*pids.values(), router, os.getpid()}) == 4
    assert set(pids.values()) | {router} <= set(one_p_one_d.cluster.processes())
    cores = {role: os.sched_getaffinity(pid) for role, pid in pids.items()}
    assert {role: set(worker.cpu_affinity) for role, worker in stats.items()} == cores
    if len(os.sched_getaffinity(0)) > 1:
        assert not cores["prefill"] & cores["decode"]
