"""The packaged two-node.yaml, in a Ray of two nodes: prefill on one, decode on the other, KV between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.config_file import packaged_configs
from tests.cluster.joined import nodes
from tests.cluster.test_joined import kvferry

pytestmark = [pytest.mark.ray, pytest.mark.slow]

_SMALL = "name: test\nmax_model_len: 512\nkv_cache_memory_bytes: 50000000\ncpu_affinity: none\nnum_threads: 1\n"


def test_the_packaged_config_hands_over_from_node_to_node(home: Path) -> None:
    with nodes(home) as ray:
        ray.start_head({})
        ray.add({}, "phase=prefill")
        ray.add({}, "phase=decode")
        text = packaged_configs()["two-node"].replace("address: auto", f"address: {ray.address}")
        path = home / "test.yaml"
        path.write_text(_SMALL + text.replace("host: 0.0.0.0", "host: 0.0.0.0\n  http_port: 0\n  grpc_port: 0"))
        kvferry(ray, "up", str(path), "--detach")
        try:
            assert kvferry(ray, "generate", "--name", "test", "--max-tokens", "4", "Paris is").strip()
            status = json.loads(kvferry(ray, "status", "--name", "test", "--json"))
        finally:
            kvferry(ray, "down", "--name", "test")
    assert [worker["role"] for worker in status["workers"]] == ["prefill", "decode"]
    (peer,) = status["workers"][0]["peers"]
    assert (peer["incarnation"], peer["transport"]) == (status["workers"][1]["incarnation"], "grpc")
