"""What has begun goes on: whatever ended it on one worker, it does not wait behind newcomers for another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run
from tests.factories import GREEDY, prompt_of, runner_of, sim_cluster
from tests.fake_model import expected_tokens

LONG = replace(GREEDY, max_tokens=60)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_step_that_fails_on_one_worker_is_taken_on_another(name):
    async def main() -> None:
        async with sim_cluster(prefill=2, decode=2) as cluster:
            runner = runner_of(cluster.workers[name].engine)

            def fail(batch: Any) -> Any:
                raise RuntimeError("no memory on the device")

            runner.execute = fail  # type: ignore[method-assign]
            prompts = [prompt_of(20, seed) for seed in range(4)]
            answers = await asyncio.gather(*(cluster.ask(p, LONG, f"r{i}") for i, p in enumerate(prompts)))
            assert answers == [expected_tokens(prompt, LONG) for prompt in prompts]

    run(main())


def test_streams_that_lose_their_worker_go_past_a_full_queue():
    async def main() -> None:
        async with sim_cluster(decode=2, router={"max_num_queued_reqs": 1}) as cluster:
            streams = []
            for i in range(4):
                streams.append(asyncio.create_task(cluster.ask(prompt_of(8, i), LONG, f"s{i}")))
                await asyncio.sleep(0.02)
            newcomers = []
            for i in range(3):
                newcomers.append(asyncio.create_task(cluster.ask(prompt_of(90, i), LONG, f"n{i}")))
                await asyncio.sleep(0.002)
            assert cluster.router.num_queued == 1
            await cluster.kill("d0")
            answers = await asyncio.gather(*streams)
            assert answers == [expected_tokens(prompt_of(8, i), LONG) for i in range(4)]
            await asyncio.gather(*newcomers, return_exceptions=True)

    run(main())
