"""Prompts that begin alike share KV on both sides, and nothing else changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run
from tests.factories import BLOCK_SIZE, GREEDY, SEEDED, prompt_of, sim_cluster
from tests.fake_model import HEAD_DIM, NUM_LAYERS, expected_tokens
from workers.kv_transfer.layout import DTYPE_BYTES

ON: dict[str, Any] = {"enable_prefix_caching": True}
TOKEN_BYTES = 2 * NUM_LAYERS * HEAD_DIM * DTYPE_BYTES["float32"]
PREFIX = prompt_of(5 * BLOCK_SIZE)


def alike(num_more: int) -> list[int]:
    return PREFIX + prompt_of(num_more, seed=num_more)


@pytest.mark.parametrize("places", [(1, 1, 0), (0, 0, 1)], ids=["1P1D", "colocated"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_are_those_of_a_model_without_a_cache(places, params):
    async def main() -> None:
        async with sim_cluster(*places, **ON) as cluster:
            for _ in range(2):
                for num_more in (0, 1, BLOCK_SIZE, BLOCK_SIZE + 1, 30):
                    assert await cluster.ask(alike(num_more), params) == expected_tokens(alike(num_more), params)
            together = await asyncio.gather(*(cluster.ask(alike(n), params, f"r{n}") for n in range(12)))
            assert together == [expected_tokens(alike(n), params) for n in range(12)]

    run(main())


def test_a_known_prefix_is_neither_computed_nor_sent_again():
    async def main() -> None:
        async with sim_cluster(**ON) as cluster:
            prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
            await cluster.ask(alike(6))
            computed, received = prefill.engine.num_prompt_tokens_computed, decode.stats().kv_bytes_received
            assert (computed, received) == (len(PREFIX) + 6, (len(PREFIX) + 6) * TOKEN_BYTES)
            await cluster.ask(alike(7))
            assert prefill.engine.num_prompt_tokens_computed - computed == 7
            assert decode.stats().kv_bytes_received - received == 7 * TOKEN_BYTES

    run(main())


def test_a_prompt_that_decode_knows_whole_is_handed_over_without_a_frame():
    async def main() -> None:
        async with sim_cluster(**ON) as cluster:
            await cluster.ask(PREFIX)
            frames = cluster.workers["d0"].stats().num_frames_received
            assert await cluster.ask(PREFIX) == expected_tokens(PREFIX, GREEDY)
            assert cluster.workers["d0"].stats().num_frames_received == frames

    run(main())


def test_salts_keep_equal_prompts_apart():
    async def main() -> None:
        async with sim_cluster(**ON) as cluster:
            engine = cluster.workers["p0"].engine
            for salt in ("a", "b", "a"):
                outputs = [o async for o in cluster.router.generate(PREFIX, GREEDY, f"r{salt}", cache_salt=salt)]
                assert outputs[-1].finish_reason is not None
            # The third found all but its last block, whose last token is computed in any case.
            assert engine.num_prompt_tokens_computed == 2 * len(PREFIX) + BLOCK_SIZE

    run(main())


def test_answers_are_right_while_cached_blocks_are_evicted_and_requests_preempted():
    async def main() -> None:
        async with sim_cluster(num_gpu_blocks_override=44, **ON) as cluster:
            params = replace(GREEDY, max_tokens=40)
            for turn in range(3):
                prompts = [alike(1 + (7 * i + turn) % 50) for i in range(10)] + [prompt_of(40, seed=turn)]
                answers = await asyncio.gather(
                    *(cluster.ask(prompt, params, f"r{turn}.{i}") for i, prompt in enumerate(prompts))
                )
                assert answers == [expected_tokens(prompt, params) for prompt in prompts]

    run(main())


def test_kv_of_a_hand_off_that_failed_is_never_found():
    async def main() -> None:
        async with sim_cluster(**ON) as cluster:
            asking = asyncio.create_task(cluster.ask(alike(60)))
            decode = cluster.workers["d0"]
            while not decode.stats().num_frames_received:  # noqa: ASYNC110  Another side's doing.
                await asyncio.sleep(0.0005)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await cluster.until_idle(1.0)
            assert decode.stats().blocks_cached == 0
            assert await cluster.ask(alike(60)) == expected_tokens(alike(60), GREEDY)

    run(main())
