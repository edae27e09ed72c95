"""vLLM's names for what kvferry measures too (telemetry.vllm_metrics), for boards and gateways that look for these.

Names and meanings: vLLM's "Production Metrics". Gateways read the first sample of a gauge, so that what differs from
worker to worker is put together: the router is the one engine that they see.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_ENGINE = "0"
# vLLM's name: ours.
_OF_ROUTER = {
    name: name
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_max_tokens",
        "request_params_n",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
    )
} | {
    # Older names of the same.
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "request_max_num_generation_tokens": "request_generation_tokens",
}
# A worker's place is that of an engine.
_OF_WORKERS = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "cache_config_info")
# And its older name.
_USAGES = ("kv_cache_usage_perc", "gpu_cache_usage_perc")


class VllmNames(Collector):
    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        """`registry`: of what there is under our names."""
        self._registry = registry
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        ours = {family.name.removeprefix("kvferry_"): family for family in self._registry.collect()}
        for name, our_name in _OF_ROUTER.items():
            if our_name in ours:
                yield _renamed(ours[our_name], name, self._as_router)
        for name in _OF_WORKERS:
            if name in ours:
                yield _renamed(ours[name], name, self._as_engine)
        if "kv_cache_usage_perc" in ours:
            usage = _usage(ours["kv_cache_usage_perc"].samples)
            for name in _USAGES:
                yield self._gauge(name, "Part of the decode workers' KV blocks that are taken, 0 to 1.", usage)
        yield self._lora()

    def _as_router(self, sample: Sample) -> dict[str, str]:
        return {"model_name": self._model_name, "engine": _ENGINE, **sample.labels}

    def _as_engine(self, sample: Sample) -> dict[str, str]:
        labels = {name: value for name, value in sample.labels.items() if name not in ("worker", "role")}
        return {**labels, "model_name": self._model_name, "engine": sample.labels["worker"]}

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
        family.add_metric([self._model_name, _ENGINE], value)
        return family

    def _lora(self) -> Metric:
        """kvferry has no adapters; gateways that ask for them are told so."""
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "Unix time in seconds; there are no adapters.", labels=labels
        )
        family.add_metric(["0", "", ""], time.time())
        return family


def _renamed(family: Metric, name: str, labels: Callable[[Sample], dict[str, str]]) -> Metric:
    renamed = Metric(f"vllm:{name}", family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        renamed.add_sample(renamed.name + suffix, labels(sample), sample.value)
    return renamed


def _usage(samples: Sequence[Sample]) -> float:
    """The mean of those that decode: prefill keeps a prompt's blocks only until they are sent."""
    decoding = [sample.value for sample in samples if sample.labels["role"] != "prefill"]
    values = decoding or [sample.value for sample in samples]
    return sum(values) / len(values) if values else 0.0
