"""What workers tell of themselves (WorkerStats), for Prometheus: on routers of all of them, on a worker of itself.

Both use the same names and labels, so that several may be scraped: take `max by (worker)` before anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from protos import router_pb2
from protos.worker_pb2 import Buckets, WorkerStats
from router.histogram import cumulative

_WORKER = ("worker", "role")
_BLOCK_STATES = ("free", "cached", "reserved", "in_use", "quarantined")

# Name: field of WorkerStats, and what it says.
_GAUGES = {
    "worker_num_running": ("num_running", "Requests in the worker's batch."),
    "worker_num_waiting": ("num_waiting", "Requests that wait for a place in the worker's batch."),
    "worker_num_waiting_for_kv": ("num_waiting_for_kv", "Requests whose KV is on its way to the worker."),
    "worker_num_queued_tokens": ("num_queued_tokens", "Tokens of the worker's requests that are still to be computed."),
    "grants": ("num_grants", "Grants that are open: hand-offs on their way to the worker."),
}
_COUNTERS = {
    "worker_num_steps": ("num_steps", "Steps of the worker's engine."),
    "worker_step_seconds": ("steps_s", "Seconds spent in steps."),
    "worker_num_prompt_tokens_computed": ("num_prompt_tokens_computed", "Prompt tokens computed."),
    "worker_num_output_tokens": ("num_output_tokens", "Output tokens sampled."),
    "worker_num_draft_tokens": ("num_draft_tokens", "Drafted tokens (speculative decoding)."),
    "worker_num_accepted_tokens": ("num_accepted_tokens", "Drafted tokens that were right."),
    "num_preemptions": ("num_preemptions", "Requests that had to give up their KV blocks and wait."),
    "prefix_cache_queries": ("num_prefix_queried_tokens", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("num_prefix_hit_tokens", "Tokens whose KV was in the prefix cache."),
    "kv_transfer_frames_overlapped": (
        "num_frames_overlapped",
        "Frames sent while their prompt still had tokens to compute.",
    ),
    "kv_replicated_bytes": ("kv_bytes_replicated", "Bytes of KV copies that other workers have kept."),
    "kv_replicas_refused": ("num_replicas_refused", "KV copies for which another worker had no room."),
    "handoff_started": ("num_hand_offs_started", "Hand-offs to the worker for which it gave a grant."),
    "handoff_committed": ("num_hand_offs_committed", "Hand-offs that joined the worker's batch."),
    "handoff_released": (
        "num_hand_offs_released",
        "Hand-offs given back without KV: token 1 ended the request, or its sender aborted it.",
    ),
    "grants_expired": ("num_grants_expired", "Grants whose lease ran out before their KV was there."),
    "grants_refused": ("num_grants_refused", "Reservations for which the worker had no room."),
}
# Name: the fields for each direction, and what they say.
_DIRECTIONS = {
    "kv_transfer_bytes": ("kv_bytes_sent", "kv_bytes_received", "Bytes of KV payload moved, copies included."),
    "kv_transfer_frames": ("num_frames_sent", "num_frames_received", "Frames of KV moved, copies included."),
}
_HISTOGRAMS = {
    "kv_transfer_seconds": (
        "transfer_s",
        "Seconds from a hand-off's first frame, or its prompt's end, to the last acknowledgement, by its sender.",
    ),
    "kv_transfer_unhidden_seconds": (
        "transfer_unhidden_s",
        "Seconds of a hand-off's transfer that prefill did not hide, by its sender.",
    ),
}
_GPU = {
    "gpu_utilization_ratio": ("utilization", "Part of the time that some kernel ran on the GPU, 0 to 1."),
    "gpu_memory_used_bytes": ("memory_used_bytes", "Bytes of the GPU's memory in use, by whomever."),
    "gpu_memory_total_bytes": ("memory_total_bytes", "Bytes of the GPU's memory."),
    "gpu_power_watts": ("power_w", "Watts that the GPU draws."),
}


class WorkerMetrics(Collector):
    """Read at each scrape: no copy that could be stale."""

    def __init__(self, workers: Callable[[], Sequence[router_pb2.WorkerStatus]]) -> None:
        self._workers = workers

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        workers = self._workers()
        heard = [worker.stats for worker in workers if worker.stats.name]
        yield _up(workers)
        yield from _state(heard)
        yield from _plain(heard)
        yield from _transfers(heard)
        yield from _gpus(heard)


def _up(workers: Sequence[router_pb2.WorkerStatus]) -> Metric:
    family = _gauge("worker_up", "1: the worker answers; 0: it does not.", "address")
    for worker in workers:
        is_ready = worker.state == router_pb2.WORKER_STATE_READY
        family.add_metric([*_labels(worker.stats), worker.address], float(is_ready))
    return family


def kv_cache_usage(stats: WorkerStats) -> float:
    """The part of its blocks that nobody else can take now, 0 to 1: what is cached, but unused, can be taken."""
    taken = stats.blocks_reserved + stats.blocks_in_use + stats.blocks_quarantined
    return taken / stats.blocks_total if stats.blocks_total else 0.0


def _state(heard: Sequence[WorkerStats]) -> Iterator[Metric]:
    blocks = _gauge("worker_blocks", "KV blocks, by what they are used for.", "state")
    usage = _gauge("kv_cache_usage_perc", "Part of the worker's KV blocks that are taken, 0 to 1.")
    info = _gauge("cache_config_info", "1. Its labels tell of the worker's KV pool.", "block_size", "num_gpu_blocks")
    drafts = _gauge("worker_draft_acceptance_rate", "Part of all drafted tokens that were right, 0 to 1.")
    for stats in heard:
        labels = _labels(stats)
        usage.add_metric(labels, kv_cache_usage(stats))
        info.add_metric([*labels, str(stats.block_size), str(stats.blocks_total)], 1)
        for state in _BLOCK_STATES:
            blocks.add_metric([*labels, state], getattr(stats, f"blocks_{state}"))
        if stats.num_draft_tokens:
            drafts.add_metric(labels, stats.num_accepted_tokens / stats.num_draft_tokens)
    yield from (blocks, usage, info, drafts)


def _plain(heard: Sequence[WorkerStats]) -> Iterator[Metric]:
    for fields, make in ((_GAUGES, _gauge), (_COUNTERS, _counter)):
        for name, (field, text) in fields.items():
            family = make(name, text)
            for stats in heard:
                family.add_metric(_labels(stats), getattr(stats, field))
            yield family


def _transfers(heard: Sequence[WorkerStats]) -> Iterator[Metric]:
    for name, (sent, received, text) in _DIRECTIONS.items():
        family = _counter(name, text, "direction")
        for stats in heard:
            family.add_metric([*_labels(stats), "sent"], getattr(stats, sent))
            family.add_metric([*_labels(stats), "received"], getattr(stats, received))
        yield family
    failures = _counter(
        "kv_transfer_failures",
        "sent: hand-offs whose KV did not get through; received: frames refused. By the class of the error.",
        "direction",
        "reason",
    )
    failed = _counter("handoff_failed", "Hand-offs to the worker that failed, by the class of the error.", "reason")
    for stats in heard:
        _add_each(failures, [*_labels(stats), "sent"], stats.send_failures)
        _add_each(failures, [*_labels(stats), "received"], stats.receive_failures)
        _add_each(failed, _labels(stats), stats.hand_offs_failed)
    yield from (failures, failed, _peer_transports(heard))
    for name, (field, text) in _HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"kvferry_{name}", text, labels=_WORKER)
        for stats in heard:
            buckets: Buckets = getattr(stats, field)
            if buckets.counts:
                histogram.add_metric(_labels(stats), cumulative(buckets.bounds, buckets.counts), buckets.sum)
        yield histogram


def _peer_transports(heard: Sequence[WorkerStats]) -> Metric:
    family = _gauge("worker_peer_transport", "1: KV goes to that peer by that transport.", "peer", "transport")
    names = {stats.incarnation: stats.name for stats in heard}
    for stats in heard:
        for peer in stats.peers:
            # One that is no more has no name, and may share its transport with the one that took its name.
            name = names.get(peer.incarnation, peer.incarnation)
            family.add_metric([*_labels(stats), name, peer.transport], 1)
    return family


def _gpus(heard: Sequence[WorkerStats]) -> Iterator[Metric]:
    for name, (field, text) in _GPU.items():
        family = _gauge(name, text, "gpu", "uuid")
        for stats in heard:
            for gpu in stats.gpus:
                if gpu.HasField(field):
                    family.add_metric([*_labels(stats), str(gpu.index), gpu.uuid], getattr(gpu, field))
        yield family
    links = _gauge(
        "gpu_nvlinks", "NVLinks to another GPU of the host; path: how PCIe gets there.", "uuid", "peer", "path"
    )
    for stats in heard:
        for gpu in stats.gpus:
            for link in gpu.links:
                links.add_metric([*_labels(stats), gpu.uuid, link.uuid, link.path], link.num_nvlinks)
    yield links


def _labels(stats: WorkerStats) -> list[str]:
    return [stats.name, stats.role]


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvferry_{name}", text, labels=[*_WORKER, *labels])


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvferry_{name}", text, labels=[*_WORKER, *labels])


def _add_each(family: CounterMetricFamily, labels: Sequence[str], counts: Mapping[str, int]) -> None:
    for reason, count in sorted(counts.items()):
        family.add_metric([*labels, reason], count)
