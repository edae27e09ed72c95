"""Faults of a config: a cluster that is told to allow them has them, and its clients do not notice."""

from __future__ import annotations

import pytest

from cluster.client import Client
from protos.router_pb2 import WORKER_STATE_READY
from tests.e2e.clusters import RealCluster, Running, up, wait_until
from tests.exact import Comparator
from tests.prompts import questions, token_ids
from workers.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# In the middle of the first answer.
CONFIG = """
router: {http_port: 0, grpc_port: 0}
max_model_len: 2048
faults: [{fault: kill, worker: decode-0, at: output, skip: 10}]
"""
NUM_TOKENS = 30
HEAL_S = 60.0


def decode_incarnation(running: Running) -> str | None:
    """None: nobody serves there now."""
    (worker,) = (w for w in running.status().workers if w.stats.role == "decode")
    return worker.stats.incarnation if worker.state == WORKER_STATE_READY else None


def until_another_serves(running: Running, before: str | None) -> None:
    wait_until(lambda: decode_incarnation(running), lambda now: now not in (None, before), HEAL_S)


def test_a_kill_that_a_flag_allows_strikes_each_process_again_and_streams_are_exact(tmp_path, comparator: Comparator):
    cluster = RealCluster("e2e-faults", tmp_path)
    refused = cluster.kvferry("up", cluster.write_config(CONFIG), "--detach")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--allow-faults" in refused.stderr
    assert not cluster.processes()

    params = SamplingParams(temperature=0.8, seed=4, max_tokens=NUM_TOKENS)
    with up(cluster, CONFIG, "--allow-faults") as running, Client(running.grpc) as client:
        for question in questions(2):
            before = decode_incarnation(running)
            prompt = token_ids(question)
            found = client.generate(prompt, temperature=0.8, seed=4, max_tokens=NUM_TOKENS)
            comparator.require_same(prompt, params, found.token_ids)
            assert len(found.token_ids) > 12
            until_another_serves(running, before)
