"""A real model, over gRPC: a stream that goes on from its copy gives the tokens of one that nothing happened to."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from router.config import RouterConfig
from router.pool import WorkerPool
from router.router import Router
from tests.checkpoints import write_folder
from tests.factories import tokens_of
from workers.config import Role, TransferConfig, WorkerConfig
from workers.request import SamplingParams
from workers.rpc import GrpcNetwork
from workers.worker import Worker

PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=90, ignore_eos=True, repetition_penalty=1.1)
PROMPT = [3 + (7 * i * i + i) % 250 for i in range(90)]


def config_of(folder: Path, role: Role) -> WorkerConfig:
    return WorkerConfig(
        model=str(folder),
        name=role,
        role=role,
        num_gpu_blocks_override=128,
        max_model_len=256,
        num_threads=1,
        transfer=TransferConfig(resume="replicate"),
    )


async def answer(folder: Path, die_after: int) -> tuple[list[int], Worker]:
    """By 1P2D, and its prefill worker; after so many tokens the worker that decodes is gone."""
    roles: tuple[Role, ...] = ("prefill", "decode", "decode")
    workers = [Worker(config_of(folder, role)) for role in roles]
    config = RouterConfig(heartbeat_s=0.1, short_prefill_tokens=32)
    pool = WorkerPool([await worker.start() for worker in workers], "router-1", config, GrpcNetwork())
    await pool.start()
    router = Router(pool, config, "router-1")
    outputs = []
    async with aclosing(router.generate(PROMPT, PARAMS, "r")) as stream:
        async for output in stream:
            outputs.append(output)
            if len(outputs) == die_after:
                await workers.pop(next(i for i, w in enumerate(workers) if w.engine.scheduler.running)).stop()
    await router.stop()
    await pool.stop()
    for worker in workers:
        worker.engine.check_integrity()
        await worker.stop()
    return tokens_of(outputs), workers[0]


@pytest.mark.parametrize("die_after", [20, 70])
def test_the_answer_is_that_of_a_stream_whose_worker_lived(tmp_path, die_after):
    folder = write_folder(tmp_path)
    whole, _ = asyncio.run(answer(folder, 0))
    resumed, prefill = asyncio.run(answer(folder, die_after))
    assert resumed == whole
    # Without the copy it would have had to sample another token 1.
    assert prefill.engine.num_output_tokens == 1
