"""A real cluster whose decode worker has three ranks: the right tokens, and one worker replaced for a lost rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster.client import Client
from protos.router_pb2 import WORKER_STATE_READY
from tests.e2e.clusters import RealCluster, up, wait_until
from tests.exact import Comparator
from tests.oracle import TransformersOracle
from tests.prompts import MODEL, questions, token_ids
from workers.models.architecture import read_architecture
from workers.models.resolve import resolve_model
from workers.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_TOKENS = 16
CONFIG = """router: {http_port: 0, grpc_port: 0, worker_wait_s: 90.0}
decode: {tensor_parallel_size: 3, block_size: 32}
kv_cache_memory_bytes: 100000000
max_model_len: 1024
"""


def test_ranks_serve_die_as_one_worker_and_are_replaced(tmp_path: Path) -> None:
    cluster = RealCluster("e2e-ranks", tmp_path)
    path = resolve_model(MODEL)
    eos = read_architecture(path).eos_token_ids
    comparator = Comparator(TransformersOracle(path, eos), eos)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with up(cluster, CONFIG) as running, Client(running.grpc) as client:

        def ask(question: str) -> None:
            ids = token_ids(question)
            answer = client.generate(ids, max_tokens=NUM_TOKENS, temperature=0.0)
            comparator.require_same(ids, params, answer.token_ids)

        def incarnation() -> str:
            ready = [w.stats for w in running.status().workers if w.state == WORKER_STATE_READY]
            return next((stats.incarnation for stats in ready if stats.role == "decode"), "")

        first, second = questions(2)
        ask(first)
        before = incarnation()
        ranks = [pid for pid, command in cluster.processes().items() if "multiprocessing.spawn" in command]
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        wait_until(incarnation, lambda now: now not in ("", before), within_s=90)
        ask(second)
    comparator.check()
