"""A real cluster with all of its telemetry on, and faults: what it tells; each line of its logs is an object."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.client import Client
from protos.router_pb2 import WORKER_STATE_READY
from tests.cluster.otlp_receiver import receiving
from tests.e2e.clusters import RealCluster, Running, up, wait_until
from tests.prompts import questions

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = """
router: {{http_port: 0, grpc_port: 0}}
max_model_len: 2048
telemetry: {{log_format: json, metrics_port: 0, vllm_metrics: true, otlp_endpoint: {endpoint}}}
transfer: {{frame_bytes: 65536}}
faults:
  - {{fault: corrupt_frame, worker: decode-0, skip: 3, count: 2}}
  - {{fault: kill, worker: decode-0, at: output, skip: 40}}
"""
HEAL_S = 60.0
PROCESSES = {"prefill-0", "decode-0", "router-0"}


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def is_whole(running: Running) -> bool:
    return all(worker.state == WORKER_STATE_READY for worker in running.status().workers)


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def test_all_of_it_is_told_through_deaths_and_damage(tmp_path):
    cluster = RealCluster("e2e-telemetry", tmp_path)
    with receiving() as receiver:
        config = CONFIG.format(endpoint=receiver.endpoint)
        with up(cluster, config, "--allow-faults") as running, Client(running.grpc) as client:
            for i, question in enumerate(questions(6)):
                client.generate(question, request_id=f"asked-{i}", max_tokens=20, ignore_eos=True)
            wait_until(lambda: is_whole(running), bool, HEAL_S)
            families = {f.name: f for f in text_string_to_metric_families(get(f"{running.http}/metrics"))}
            targets = json.loads(get(f"{running.http}/metrics/targets"))
            for target in targets:
                assert target["labels"]["__meta_kvferry_worker"] in get(f"http://{target['targets'][0]}/metrics")
        spans = receiver.spans()
    assert {target["labels"]["__meta_kvferry_worker"] for target in targets} == {"prefill-0", "decode-0"}
    assert families["vllm:e2e_request_latency_seconds"].samples
    retries = sum(sample.value for sample in families["kvferry_handoff_retries"].samples)
    tries = [span for span in spans if span.name == "try"]
    assert sum(span.name == "request" for span in spans) == 6
    assert len(tries) == 6 + retries > 6

    # Others are Ray's own, and what `up` printed.
    logs = [log for log in tmp_path.rglob("*.log") if log.name.partition(".")[0] in PROCESSES]
    assert len(logs) > len(PROCESSES), "no process was started anew"
    written = [line for log in logs for line in lines_of(log)]
    assert all({"time", "level", "logger", "message", "process"} <= line.keys() for line in written)
    assert {line["process"] for line in written} == PROCESSES
    about = {line["request_id"] for line in written if "request_id" in line}
    assert about
    assert about <= {f"asked-{i}" for i in range(6)}
