"""Clients that go away before token 1, and between the two legs of their request."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.sim.loop import run
from tests.factories import GREEDY, prompt_of, sim_cluster

LONG = replace(GREEDY, max_tokens=50)
# Seven steps of prefill, of 7 ms each.
PROMPT = prompt_of(100)


@pytest.mark.parametrize("after_s", [0.004, 0.012, 0.025])
def test_a12_a_client_that_leaves_before_token_1_stops_prefill_and_decode_is_told(after_s):
    async def main() -> None:
        async with sim_cluster() as cluster:
            asking = asyncio.create_task(cluster.ask(PROMPT, LONG))
            await asyncio.sleep(after_s)
            assert cluster.workers["d0"].stats().blocks_reserved > 0
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            # A step that runs is not interrupted; nothing comes after it.
            await asyncio.sleep(0.012)
            assert cluster.busy() == {}
            computed = cluster.workers["p0"].engine.num_prompt_tokens_computed
            assert computed < len(PROMPT)
            await asyncio.sleep(0.2)
            assert cluster.workers["p0"].engine.num_prompt_tokens_computed == computed

    run(main())


@pytest.mark.parametrize("after_s", [0.0, 0.0002, 0.0005, 0.001, 0.002])
def test_a13_a_client_that_leaves_between_token_1_and_the_first_of_decode_frees_both(after_s):
    async def main() -> None:
        async with sim_cluster() as cluster:
            async with aclosing(cluster.router.generate(PROMPT, LONG, "r")) as outputs:
                first = await anext(outputs)
                assert len(first.token_ids) == 1
                await asyncio.sleep(after_s)
            await asyncio.sleep(0.02)
            assert cluster.busy() == {}
            # Two steps at most had begun.
            assert cluster.workers["d0"].engine.num_output_tokens <= 2

    run(main())


@pytest.mark.parametrize("after_s", [0.0, 0.0003, 0.0006, 0.001])
def test_a13_a_client_that_leaves_between_reserve_and_prefill_gives_the_grant_back(after_s):
    async def main() -> None:
        async with sim_cluster() as cluster:
            asking = asyncio.create_task(cluster.ask(PROMPT, LONG))
            await asyncio.sleep(after_s)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.sleep(0.02)
            assert cluster.busy() == {}

    run(main())
