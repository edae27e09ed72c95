"""A worker that is silent for a while, and failures that must be noticed by the side that waits."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.sim.loop import run
from cluster.sim.network import drop
from tests.factories import GREEDY, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from workers.errors import UnavailableError

LONG = replace(GREEDY, max_tokens=200)


async def until(holds):
    while not holds():  # noqa: ASYNC110  What is waited for is another side's doing.
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("silence_s", [2.0, 5.0])
def test_a_stream_survives_the_only_decode_worker_being_silent_for_seconds(silence_s):
    async def main() -> None:
        async with sim_cluster(max_model_len=2000, num_gpu_blocks_override=600) as cluster:
            long = replace(GREEDY, max_tokens=1900)
            asking = asyncio.create_task(cluster.ask(prompt_of(20), long))
            decode = cluster.workers["d0"]
            await until(lambda: decode.engine.num_output_tokens > 5)
            silence = cluster.network.fault("GetStats", drop, to=decode.address)
            await until(lambda: cluster.pool.whole_role() == "prefill")
            await asyncio.sleep(silence_s)
            silence.remove()
            assert await asking == expected_tokens(prompt_of(20), long)

    run(main())


def test_a_new_request_is_refused_soon_when_no_worker_is_expected_back():
    async def main() -> None:
        async with sim_cluster(router={"worker_wait_s": 5.0}) as cluster:
            await cluster.kill("d0")
            await cluster.kill("p0")
            await asyncio.sleep(5.0)
            start_s = asyncio.get_running_loop().time()
            with pytest.raises(UnavailableError):
                await cluster.ask(prompt_of(20))
            assert asyncio.get_running_loop().time() - start_s < 2.0

    run(main())


def test_a_hand_off_that_decode_loses_during_a_long_prefill_is_tried_again_before_the_prefill_ends():
    async def main() -> None:
        async with sim_cluster(
            1, 2, max_num_batched_tokens=64, max_model_len=2000, num_gpu_blocks_override=600
        ) as cluster:
            prompt = prompt_of(1500)
            asking = asyncio.create_task(cluster.ask(prompt, LONG))
            prefill = cluster.workers["p0"].engine
            await until(lambda: prefill.num_prompt_tokens_computed > 100)
            victim = next(n for n in ("d0", "d1") if cluster.workers[n].engine.scheduler.waiting_for_kv)
            await cluster.kill(victim)
            assert await asking == expected_tokens(prompt, LONG)
            # The first prefill was given up early: under two whole prompts were computed.
            assert prefill.num_prompt_tokens_computed < 2 * len(prompt)

    run(main())


def test_an_abort_that_got_lost_is_said_again():
    async def main() -> None:
        async with sim_cluster(max_model_len=2000, num_gpu_blocks_override=600, idle_within_s=5) as cluster:
            cluster.network.fault("Abort", drop, count=2)
            async with aclosing(cluster.router.generate(prompt_of(6), replace(GREEDY, max_tokens=1900), "r")) as stream:
                await anext(stream)
                await anext(stream)

    run(main())
