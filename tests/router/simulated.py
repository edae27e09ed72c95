"""A whole cluster on the virtual clock, asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.factories import GREEDY, SimCluster, prompt_of
from workers.request import SamplingParams

LONG = replace(GREEDY, max_tokens=60)
PLACES = {"1P1D": (1, 1, 0), "2P3D": (2, 3, 0), "colocated": (0, 0, 1)}


def ask(cluster: SimCluster, length: int, params: SamplingParams = LONG, name: str = "") -> asyncio.Task[list[int]]:
    name = name or f"r{length}"
    return asyncio.create_task(cluster.ask(prompt_of(length), params, name), name=name)


async def tokens_until(cluster: SimCluster, count: int) -> str:
    """Wait until a request that was asked for has so many tokens; the decode worker it is on."""
    while True:
        for name, worker in cluster.alive().items():
            if any(r.num_output_tokens >= count for r in worker.engine.sequences() if r.handed_over):
                return name
        await asyncio.sleep(0.001)
