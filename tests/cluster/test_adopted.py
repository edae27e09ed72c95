"""`kvferry up` is killed, in a Ray that is not its own: the cluster serves on, and the next one takes it over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.client import AsyncClient
from cluster.state import StateFolder
from tests.cluster.joined import Nodes, nodes
from tests.cluster.test_joined import kvferry

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = """
name: test
address: {address}
cpu_affinity: none
num_threads: 1
kv_cache_memory_bytes: 50000000
max_model_len: 512
router: {{http_port: 0, grpc_port: 0}}
"""


def status(ray: Nodes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kvferry(ray, "status", "--name", "test", "--json"))
    return found


def incarnations(told: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["incarnation"] for one in (*told["workers"], *told["routers"])}


async def answer(client: AsyncClient) -> list[int]:
    completion = await client.generate("The sea", max_tokens=60, temperature=0, ignore_eos=True)
    return list(completion.token_ids)


async def while_nobody_controls(ray: Nodes, path: Path) -> None:
    state = StateFolder("test").running()
    assert state is not None
    async with AsyncClient(state.grpc_endpoint) as client:
        wanted = await answer(client)
        asked = [asyncio.create_task(answer(client)) for _ in range(4)]
        os.kill(state.pid, signal.SIGKILL)
        await asyncio.sleep(7)
        asked += [asyncio.create_task(answer(client)) for _ in range(4)]
        await asyncio.to_thread(kvferry, ray, "up", str(path), "--detach")
        for one in asked:
            assert await one == wanted


def test_a_cluster_outlives_its_controller_and_the_next_one_takes_it_over(home: Path) -> None:
    with nodes(home) as ray:
        ray.start_head({})
        path = home / "test.yaml"
        path.write_text(CONFIG.format(address=ray.address))
        kvferry(ray, "up", str(path), "--detach")
        before = status(ray)
        try:
            # Another process while this one is there.
            command = [sys.executable, "-m", "cluster.cli", "up", str(path)]
            elsewhere = ray.environment | {"HOME": str(home / "other")}
            second = subprocess.run(command, env=elsewhere, capture_output=True, text=True, timeout=120)
            assert second.returncode == 2
            assert "a cluster named test runs in this Ray already" in second.stderr
            asyncio.run(while_nobody_controls(ray, path))
            after = status(ray)
            assert incarnations(after) == incarnations(before)
            (decode,) = (worker for worker in after["workers"] if worker["role"] == "decode")
            os.kill(decode["pid"], signal.SIGKILL)
            give_up_s = time.monotonic() + 60
            while incarnations(now := status(ray)).get("decode-0", decode["incarnation"]) == decode["incarnation"]:
                assert time.monotonic() < give_up_s, now
                time.sleep(0.2)
            assert "prefill=2" not in kvferry(ray, "scale", "prefill=2", "--name", "test")
            assert len(status(ray)["workers"]) == 3
        finally:
            kvferry(ray, "down", "--name", "test")


def up(ray: Nodes, path: Path, home: Path) -> subprocess.Popen[str]:
    """In the foreground, by a user of whom no other process knows."""
    command = [sys.executable, "-m", "cluster.cli", "up", str(path)]
    environment = ray.environment | {"HOME": str(home)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_said(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    assert any(text in line for line in iter(process.stdout.readline, "")), text


def test_who_dies_while_loading_leaves_nothing_in_the_way_and_who_was_replaced_goes(home: Path) -> None:
    with nodes(home) as ray:
        ray.start_head({})
        path = home / "test.yaml"
        path.write_text(CONFIG.format(address=ray.address))
        first = up(ray, path, home / "first")
        until_said(first, "loading")
        first.kill()
        first.communicate()
        time.sleep(7)
        second = up(ray, path, home / "second")
        until_said(second, "test is ready")
        os.kill(second.pid, signal.SIGSTOP)
        time.sleep(7)
        kvferry(ray, "up", str(path), "--detach")
        try:
            before = status(ray)
            os.kill(second.pid, signal.SIGCONT)
            _, error = second.communicate(timeout=30)
            assert (second.returncode, error) == (1, "kvferry: another `kvferry up` has taken over this cluster\n")
            time.sleep(2)
            assert incarnations(status(ray)) == incarnations(before)
            assert kvferry(ray, "generate", "--name", "test", "--max-tokens", "2", "Paris is").strip()
        finally:
            kvferry(ray, "down", "--name", "test")
