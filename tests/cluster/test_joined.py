"""A cluster in somebody else's Ray: its processes are where their config says, and go on elsewhere when a node dies."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.cluster.joined import Nodes, kill_node, nodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = """
name: test
address: {address}
cpu_affinity: none
num_threads: 1
kv_cache_memory_bytes: 50000000
max_model_len: 512
colocated: {{replicas: 1, resources: {{place: 1}}, label_selector: {{group: worker}}}}
router: {{host: 0.0.0.0, http_port: 0, grpc_port: 0, resources: {{door: 1}}}}
"""


def kvferry(ray: Nodes, *arguments: str) -> str:
    command = [sys.executable, "-m", "cluster.cli", *arguments]
    done = subprocess.run(command, env=ray.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def worker_of(ray: Nodes) -> dict[str, Any]:
    (worker,) = json.loads(kvferry(ray, "status", "--name", "test", "--json"))["workers"]
    found: dict[str, Any] = worker
    return found


def test_processes_are_on_the_nodes_they_ask_for_and_a_dead_node_is_left(home):
    with nodes(home) as ray:
        ray.start_head({"door": 1})
        # Its label keeps the worker from it, though it has the place.
        ray.add({"place": 1}, "group=other")
        first = ray.add({"place": 1}, "group=worker")
        path = home / "test.yaml"
        path.write_text(CONFIG.format(address=ray.address))
        assert "test is ready: HTTP http://0.0.0.0" not in kvferry(ray, "up", str(path), "--detach")
        try:
            before = worker_of(ray)
            assert not before["address"].startswith("127.")
            ray.add({"place": 1}, "group=worker")
            kill_node(first)
            give_up_s = time.monotonic() + 60
            while (after := worker_of(ray))["address"] == before["address"] or after["state"] != "ready":
                assert time.monotonic() < give_up_s, after
                time.sleep(0.2)
            assert kvferry(ray, "generate", "--name", "test", "--max-tokens", "2", "Paris is").strip()
        finally:
            kvferry(ray, "down", "--name", "test")
