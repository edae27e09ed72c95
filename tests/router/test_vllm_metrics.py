"""Boards and gateways made for vLLM find what they look for, on the switch telemetry.vllm_metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from protos import router_pb2, worker_pb2
from router.metrics import RouterMetrics
from workers.request import FinishReason, SamplingParams
from workers.timeline import Timeline

# What the Gateway API inference extension asks of a model server (its proposal 003), and the panels of the board that
# vLLM comes with (examples/online_serving/prometheus_grafana/grafana.json).
GATEWAY = {
    "num_requests_waiting": "gauge",
    "num_requests_running": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "lora_requests_info": "gauge",
}
BOARD = {
    "e2e_request_latency_seconds": "histogram",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "time_per_output_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "time_to_first_token_seconds": "histogram",
    "gpu_cache_usage_perc": "gauge",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_success": "counter",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
}


class Load:
    num_queued = 3
    num_running = 2
    num_retries: ClassVar[Counter[str]] = Counter()


def worker(name: str, role: str, in_use: int) -> router_pb2.WorkerStatus:
    stats = worker_pb2.WorkerStats(
        name=name,
        role=role,
        block_size=16,
        blocks_total=100,
        blocks_free=90 - in_use,
        blocks_cached=10,
        blocks_in_use=in_use,
        num_prefix_queried_tokens=50,
        num_prefix_hit_tokens=20,
    )
    return router_pb2.WorkerStatus(address="h:1", state=router_pb2.WORKER_STATE_READY, stats=stats)


def metrics_of(workers: Sequence[router_pb2.WorkerStatus]) -> RouterMetrics:
    metrics = RouterMetrics("m")
    metrics.watch(Load(), lambda: workers)
    metrics.finished(FinishReason.STOP, 7)
    metrics.first_token(0.3)
    metrics.times(1.0, 0.1, Timeline(queued_s=0.2, prefill_s=0.1, decode_s=0.5))
    metrics.lengths(7, 5, SamplingParams(max_tokens=9, n=1))
    return metrics


def families(metrics: RouterMetrics) -> dict[str, tuple[str, list[Sample]]]:
    found = text_string_to_metric_families(metrics.exposition().decode())
    return {family.name: (family.type, family.samples) for family in found}


def test_they_are_there_on_the_switch_alone():
    metrics = metrics_of([worker("d0", "decode", 40)])
    assert not [name for name in families(metrics) if name.startswith("vllm:")]
    metrics.add_vllm_names()
    found = families(metrics)
    assert {name: found.get(f"vllm:{name}", ("",))[0] for name in GATEWAY | BOARD} == GATEWAY | BOARD


def test_they_say_what_ours_say_with_vllms_labels():
    metrics = metrics_of([worker("d0", "decode", 40)])
    metrics.add_vllm_names()
    found = families(metrics)
    for name in ("time_to_first_token_seconds", "request_success", "prompt_tokens", "request_decode_time_seconds"):
        theirs, ours = (
            {
                (sample.name.removeprefix(prefix), *sorted((sample.labels | {"engine": "0"}).items())): sample.value
                for sample in found[prefix + name][1]
            }
            for prefix in ("vllm:", "kvferry_")
        )
        assert theirs == ours
    assert found["vllm:num_requests_waiting"][1] == [
        Sample("vllm:num_requests_waiting", {"model_name": "m", "engine": "0"}, 3.0)
    ]


def test_usage_is_one_figure_of_the_workers_that_decode():
    metrics = metrics_of([worker("p0", "prefill", 90), worker("d0", "decode", 40), worker("d1", "decode", 60)])
    metrics.add_vllm_names()
    (usage,) = families(metrics)["vllm:kv_cache_usage_perc"][1]
    assert usage.value == 0.5


def test_figures_of_workers_are_told_as_of_engines():
    metrics = metrics_of([worker("d0", "decode", 40), worker("d1", "decode", 60)])
    metrics.add_vllm_names()
    found = families(metrics)
    hits = {sample.labels["engine"]: sample.value for sample in found["vllm:prefix_cache_hits"][1]}
    assert hits == {"d0": 20.0, "d1": 20.0}
    info = {(s.labels["block_size"], s.labels["num_gpu_blocks"]) for s in found["vllm:cache_config_info"][1]}
    assert info == {("16", "100")}
