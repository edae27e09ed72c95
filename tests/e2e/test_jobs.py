"""A durable job through a real cluster with two routers, one of which is killed in the middle of it."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.client import Client
from tests.e2e.clusters import RealCluster, up, wait_until
from workers.errors import KVFerryError

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_PROMPTS = 500


def test_a_job_of_500_prompts_outlives_one_of_two_routers(tmp_path: Path):
    config = (
        "router: {replicas: 2, http_port: 0, grpc_port: 0}\n"
        f"jobs: {{url: 'sqlite:///{tmp_path}/jobs.sqlite', lease_s: 2.0}}\n"
        "max_model_len: 512\n"
    )
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{at} and {at} make"}) for at in range(NUM_PROMPTS)]
    prompts.write_text("\n".join(lines))
    with up(RealCluster("e2e-jobs", tmp_path), config) as running, Client(running.grpc) as client:
        pids = router_pids(running.grpc)
        assert len(set(pids)) == 2
        job = client.submit(prompts, max_tokens=2, seed=1)
        results = []
        for result in job.results():
            results.append(result)
            if len(results) == NUM_PROMPTS // 5:
                os.kill(pids[0], signal.SIGKILL)
        assert Counter(result.index for result in results) == dict.fromkeys(range(NUM_PROMPTS), 1)
        assert [result.error for result in results if result.error] == []
        assert (job.refresh().status, job.info.num_failed) == ("completed", 0)
        # The one that was killed is there again, at its port.
        wait_until(lambda: router_pids(running.grpc), lambda now: len(now) == 2 and now[0] != pids[0], 60)
        by_cli = running.cluster.kvferry("jobs", job.id, "--results", "--name", running.cluster.name)
        shown = [json.loads(line) for line in by_cli.stdout.splitlines()]
        assert (by_cli.returncode, len(shown)) == (0, NUM_PROMPTS)
        # What was answered after a crash is what would have been answered without it.
        for line in shown[:: NUM_PROMPTS // 5]:
            again = client.generate(f"{line['index']} and {line['index']} make", max_tokens=2, seed=1)
            assert list(again.token_ids) == line["token_ids"]


def router_pids(target: str) -> list[int]:
    """Of those that answer."""
    pids = []
    for one in target.split(","):
        with Client(one) as client, suppress(KVFerryError):
            pids += [router.pid for router in client.status(timeout_s=2.0).routers]
    return pids
