"""A cluster that is scaled, flipped and restarted while streams are under way: no request fails, no token differs."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cluster.client import AsyncClient
from cluster.state import StateFolder

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = """
name: changes
router: {http_port: 0, grpc_port: 0}
kv_cache_memory_bytes: 100000000
max_model_len: 1024
scaling: {drain_timeout_s: 3}
"""
# Each with the workers that are there afterwards.
CHANGES = [
    (["scale", "prefill=2", "decode=2"], {"prefill": 2, "decode": 2}),
    (["flip", "prefill-1", "decode"], {"prefill": 1, "decode": 3}),
    (["flip", "prefill-1", "prefill"], {"prefill": 2, "decode": 2}),
    (["flip", "decode-1", "prefill"], {"prefill": 3, "decode": 1}),
    (["scale", "prefill=1", "decode=2"], {"prefill": 1, "decode": 2}),
    (["restart"], {"prefill": 1, "decode": 2}),
    (["scale", "decode=1"], {"prefill": 1, "decode": 1}),
    # The only one of its role.
    (["restart", "prefill"], {"prefill": 1, "decode": 1}),
]
PROMPTS = ["Paris is", "The sea", "Once upon a time", "def fib(n):", "In 1969"]
NUM_STREAMS = 4


def kvferry(*arguments: str) -> str:
    command = [sys.executable, "-m", "cluster.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def answers(client: AsyncClient, prompt: str) -> list[int]:
    completion = await client.generate(prompt, max_tokens=80, temperature=0, ignore_eos=True)
    return list(completion.token_ids)


async def roles_of(client: AsyncClient) -> Counter[str]:
    """Of those that get requests."""
    return Counter(worker.stats.role for worker in (await client.status()).workers if not worker.draining)


async def change_under_load(target: str) -> None:
    async with AsyncClient(target) as client:
        wanted = {prompt: await answers(client, prompt) for prompt in PROMPTS}
        done = asyncio.Event()
        ended: asyncio.Queue[str] = asyncio.Queue()

        async def stream(first: int) -> None:
            for at in itertools.count(first):
                prompt = PROMPTS[at % len(PROMPTS)]
                assert await answers(client, prompt) == wanted[prompt]
                ended.put_nowait(prompt)
                if done.is_set():
                    return

        async with asyncio.TaskGroup() as group:
            for first in range(NUM_STREAMS):
                group.create_task(stream(first))
            for command, roles in CHANGES:
                await asyncio.to_thread(kvferry, *command, "--name", "changes")
                async with asyncio.timeout(5):  # A heartbeat tells who a worker is now.
                    while await roles_of(client) != roles:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                for _ in range(ended.qsize() + NUM_STREAMS):
                    await ended.get()
            done.set()


def test_streams_go_on_exactly_through_every_change(home: Path) -> None:
    path = home / "changes.yaml"
    path.write_text(CONFIG)
    kvferry("up", str(path), "--detach")
    try:
        state = StateFolder("changes").running()
        assert state is not None
        asyncio.run(change_under_load(state.grpc_endpoint))
        status = json.loads(kvferry("status", "--name", "changes", "--json"))
        kvferry("verify", "--name", "changes")
    finally:
        kvferry("down", "--name", "changes")
    assert status["ready"]
