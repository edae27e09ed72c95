"""A fault of kind `kill` kills: processes of their own end by SIGKILL at their step, and the answer is whole."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import pytest

from router.config import RouterConfig
from router.pool import WorkerPool
from router.router import Router
from tests.factories import SEEDED, make_worker, prompt_of
from tests.fake_model import expected_tokens
from workers.rpc import GrpcNetwork

PROMPT = prompt_of(20)


@contextmanager
def worker_process(role: str, step: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.workers.faulty_process", role, step]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@asynccontextmanager
async def router_of(doomed: str) -> AsyncIterator[Router]:
    """In front of the process, and of a worker of each role that nothing happens to."""
    network: Any = GrpcNetwork()
    config = RouterConfig(heartbeat_s=0.2, retry_s=0.05)
    workers = [make_worker(network, name=f"whole-{role}", role=role) for role in ("prefill", "decode")]
    addresses = [await worker.start() for worker in workers]
    pool = WorkerPool([doomed, *addresses], "router-1", config, network)
    await pool.start()
    router = Router(pool, config, "router-1")
    try:
        yield router
    finally:
        await router.stop()
        await pool.stop()
        for worker in workers:
            await worker.stop()


@pytest.mark.parametrize(
    ("role", "step"),
    [
        *(("prefill", step) for step in ("prefill", "token_1")),
        *(("decode", step) for step in ("reserve", "frame", "commit", "committed", "output")),
    ],
)
def test_a_process_is_killed_at_its_step_and_the_answer_is_whole(role, step):
    async def main(process: subprocess.Popen[str], address: str) -> None:
        async with router_of(address) as router:
            for number in range(8):
                async with aclosing(router.generate(PROMPT, SEEDED, f"r{number}")) as stream:
                    tokens = [token async for output in stream for token in output.token_ids]
                assert tokens == expected_tokens(PROMPT, SEEDED)
                if process.poll() is not None:
                    break

    with worker_process(role, step) as (process, address):
        asyncio.run(main(process, address))
        assert process.wait(5) == -signal.SIGKILL
