"""The two sides know prefixes of different lengths, in blocks of different sizes: each token's KV finds its place."""

from __future__ import annotations

import asyncio

import pytest

from cluster.sim.loop import run
from cluster.sim.network import SimNetwork
from router.config import RouterConfig
from router.pool import WorkerPool
from router.router import Router
from tests.factories import BLOCK_SIZE, GREEDY, in_use, make_worker, prompt_of, tokens_of
from tests.fake_model import expected_tokens
from workers.request import Request
from workers.worker import Worker

PROMPT = prompt_of(6 * BLOCK_SIZE + 1)
# A block size is a multiple of BLOCK_SIZE, the unit of hashes.
SIZES = [(BLOCK_SIZE, BLOCK_SIZE), (BLOCK_SIZE, 3 * BLOCK_SIZE), (2 * BLOCK_SIZE, BLOCK_SIZE)]


async def learn(worker: Worker, num_tokens: int) -> None:
    """Let it compute so much of the prompt by itself."""
    if num_tokens:
        worker.submit(Request("earlier", PROMPT[:num_tokens], GREEDY, router_id="nobody"))
    while worker.engine.requests:  # noqa: ASYNC110  The engine's doing.
        await asyncio.sleep(0.01)


async def answer_of(known: tuple[int, int], sizes: tuple[int, int]) -> tuple[list[int], int]:
    """By a prefill and a decode worker that know so much of it; and how many prompt tokens decode was sent."""
    network = SimNetwork()
    workers = [
        make_worker(
            network.host(), name=role, role=role, block_size=size, num_gpu_blocks_override=64,
            incarnation=f"{i:032x}", enable_prefix_caching=True,
        )
        for i, (role, size) in enumerate(zip(("prefill", "decode"), sizes, strict=True))
    ]  # fmt: skip
    for worker, num_tokens in zip(workers, known, strict=True):
        await worker.start()
        await learn(worker, num_tokens)
    config = RouterConfig()
    pool = WorkerPool([worker.address for worker in workers], "router-1", config, network.host())
    await pool.start()
    router = Router(pool, config, "router-1")
    answer = tokens_of([output async for output in router.generate(PROMPT, GREEDY, "r")])
    await router.stop()
    await pool.stop()
    decode = workers[1]
    received = decode.stats().kv_bytes_received // decode.layout.token_bytes
    for worker in workers:
        assert in_use(worker) == {}
        await worker.stop()
    return answer, received


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("on_decode", [0, BLOCK_SIZE, 3 * BLOCK_SIZE + 1, 6 * BLOCK_SIZE])
@pytest.mark.parametrize("on_prefill", [0, 2 * BLOCK_SIZE, 6 * BLOCK_SIZE])
def test_the_answer_is_that_of_a_model_without_a_cache(on_prefill, on_decode, sizes):
    answer, received = run(answer_of((on_prefill, on_decode), sizes))
    assert answer == expected_tokens(PROMPT, GREEDY)
    assert received == len(PROMPT) - on_decode // sizes[1] * sizes[1]
