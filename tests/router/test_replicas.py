"""transfer.resume: replicate. A stream goes on from the copy of its KV, and with or without one its answer is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run
from tests.factories import BLOCK_SIZE, GREEDY, SEEDED, SimCluster, prompt_of, runner_of, sim_cluster
from tests.fake_model import expected_choices, expected_tokens
from workers.request import SamplingParams

LONG = replace(GREEDY, max_tokens=60)
# A token more than a block may be missing: the one that was sampled last has no KV yet.
SHORT = 3 * BLOCK_SIZE


def replicating(
    prefill: int = 1, decode: int = 2, colocated: int = 0, resume: str = "replicate", **settings: Any
) -> AbstractAsyncContextManager[SimCluster]:
    merged: dict[str, Any] = {
        "enable_prefix_caching": True,
        "router": {"short_prefill_tokens": SHORT},
        # What was under way to a dead worker ends by its deadline.
        "idle_within_s": 12.0,
    } | settings
    merged["transfer"] = {"resume": resume} | merged.get("transfer", {})
    return sim_cluster(prefill, decode, colocated, **merged)


def ask(cluster: SimCluster, length: int, params: SamplingParams = LONG) -> asyncio.Task[list[int]]:
    return asyncio.create_task(cluster.ask(prompt_of(length), params, f"r{length}"))


async def decoding(cluster: SimCluster, num_tokens: int) -> str:
    """Wait until some answer has so many tokens; the worker it is on."""
    while True:
        for name, worker in cluster.alive().items():
            if any(r.num_output_tokens >= num_tokens for r in worker.engine.scheduler.running):
                return name
        await asyncio.sleep(0.001)


def computed_again(cluster: SimCluster, prompt: Sequence[int], num_known: int) -> int:
    """Tokens among the first `num_known` of any request that were computed in second attempts."""
    steps = [step for worker in cluster.alive().values() for step in runner_of(worker.engine).steps]
    total = 0
    for request_id, start, num_tokens in (entry for step in steps for entry in step):
        if request_id.endswith(".2"):
            total += max(0, min(start + num_tokens, len(prompt) + num_known) - start)
    return total


@pytest.mark.parametrize("places", [(1, 2, 0), (1, 1, 0), (2, 3, 0), (0, 0, 2)], ids=["1P2D", "1P1D", "2P3D", "2C"])
@pytest.mark.parametrize("num_tokens", [2, 5, 30, 55])
def test_a_stream_whose_worker_dies_goes_on_from_its_copy_at_any_token(places, num_tokens):
    async def main() -> None:
        async with replicating(*places) as cluster:
            prompt = prompt_of(50)
            asking = ask(cluster, 50)
            await cluster.kill(await decoding(cluster, num_tokens))
            assert await asking == expected_tokens(prompt, LONG)
            assert computed_again(cluster, prompt, num_tokens) <= 2 * BLOCK_SIZE

    run(main())
