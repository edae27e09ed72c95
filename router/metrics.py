"""What the router counts, for Prometheus. Suffixes of metric names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos import router_pb2
from protos.worker_pb2 import WorkerStats
from router.histogram import Histogram, Tally
from workers.request import FinishReason
from workers.timeline import Timeline

_TTFT_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_BUCKETS_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

# Histogram of a phase -> its field of Timeline.
_PHASES = {
    "request_queue_time_seconds": "queued_s",
    "request_prefill_queue_time_seconds": "prefill_queued_s",
    "request_prefill_time_seconds": "prefill_s",
    "request_transfer_time_seconds": "transfer_s",
    "request_transfer_unhidden_time_seconds": "transfer_unhidden_s",
    "request_decode_queue_time_seconds": "decode_queued_s",
    "request_decode_time_seconds": "decode_s",
}
_BLOCK_STATES = ("free", "cached", "reserved", "in_use", "quarantined")
_WORKER_GAUGES = ("blocks_total", "num_running", "num_waiting", "num_waiting_for_kv", "num_queued_tokens")
_WORKER_COUNTERS = (
    "num_steps",
    "num_prompt_tokens_computed",
    "num_output_tokens",
    "num_preemptions",
    "num_draft_tokens",
    "num_accepted_tokens",
    "kv_bytes_sent",
    "kv_bytes_received",
    "num_frames_sent",
    "num_frames_received",
    "num_frames_overlapped",
    "kv_bytes_replicated",
    "num_replicas_refused",
)


class Load(Protocol):
    """What of the router is shown: requests that wait for a worker, and that have one."""

    @property
    def num_queued(self) -> int: ...

    @property
    def num_running(self) -> int: ...


class RouterMetrics:
    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to token 1.", _TTFT_BUCKETS_S)
        self._gap = self._histogram(
            "inter_token_latency_seconds", "Between the outputs of a request, per token.", _TOKEN_BUCKETS_S
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "(E2E - TTFT) / (N - 1) of a request.", _TOKEN_BUCKETS_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the last token.", _REQUEST_BUCKETS_S)
        self._phases = {
            field: self._histogram(name, f"{field} of the timeline.", _TTFT_BUCKETS_S)
            for name, field in _PHASES.items()
        }
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = Tally("kvferry_generation_tokens", "Output tokens.", model_name, self.registry)
        self._success = Counter(
            "kvferry_request_success", "Requests ended.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._job_prompts = Counter(
            "kvferry_job_prompts", "Prompts of jobs answered.", ["model_name", "outcome"], registry=self.registry
        )
        self._job_seconds = self._histogram(
            "job_prompt_seconds", "The try that answered a prompt of a job.", _REQUEST_BUCKETS_S
        )
        self._errors = Counter(
            "kvferry_request_errors", "Requests failed.", ["model_name", "type"], registry=self.registry
        )

    def watch(self, load: Load, workers: Callable[[], Sequence[router_pb2.WorkerStatus]]) -> None:
        """Show the router's load and its workers' latest statistics too."""
        self.registry.register(_Live(load, workers))

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def tokens(self, count: int, gap_s: float | None) -> None:
        """`count` new tokens of a request, `gap_s` after its previous ones (None: the first, or not to be timed)."""
        self._generation_tokens.add(count)
        if gap_s is not None:
            self._gap.observe(gap_s / max(count, 1))

    def finished(self, reason: FinishReason, num_prompt_tokens: int) -> None:
        self._success.labels(self._model_name, reason.value).inc()
        self._prompt_tokens.inc(num_prompt_tokens)

    def times(self, e2e_s: float, tpot_s: float, timeline: Timeline) -> None:
        self._e2e.observe(e2e_s)
        if tpot_s > 0:
            self._tpot.observe(tpot_s)
        for field, histogram in self._phases.items():
            histogram.observe(getattr(timeline, field))

    def failed(self, error_type: str) -> None:
        self._errors.labels(self._model_name, error_type).inc()

    def job_prompt(self, failed: bool, seconds: float) -> None:
        """Answered, if only with an error, by a try that took so long."""
        self._job_prompts.labels(self._model_name, "failed" if failed else "done").inc()
        self._job_seconds.observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"kvferry_{name}", text, self._model_name, buckets, self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"kvferry_{name}", text, ["model_name"], registry=self.registry).labels(self._model_name)


class _Live(Collector):
    """Read at each scrape: no copy that could be stale."""

    def __init__(self, load: Load, workers: Callable[[], Sequence[router_pb2.WorkerStatus]]) -> None:
        self._load = load
        self._workers = workers

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield _gauge("num_requests_running", "Requests that have a worker.", self._load.num_running)
        yield _gauge("num_requests_waiting", "Requests that wait for a worker.", self._load.num_queued)
        yield from _of_workers(self._workers())


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvferry_{name}", text, value=value)


def _of_workers(workers: Sequence[router_pb2.WorkerStatus]) -> Iterator[Metric]:
    heard = [worker.stats for worker in workers if worker.stats.name]
    yield _up(workers)
    yield _blocks(heard)
    for field in _WORKER_GAUGES:
        yield _each(GaugeMetricFamily(f"kvferry_worker_{field}", field, labels=["worker", "role"]), heard, field)
    for field in _WORKER_COUNTERS:
        yield _each(CounterMetricFamily(f"kvferry_worker_{field}", field, labels=["worker", "role"]), heard, field)
    yield _draft_acceptance(heard)
    yield _peer_transports(heard)


def _up(workers: Sequence[router_pb2.WorkerStatus]) -> Metric:
    family = GaugeMetricFamily("kvferry_worker_up", "1: it answers.", labels=["worker", "role", "address"])
    for worker in workers:
        labels = [worker.stats.name, worker.stats.role, worker.address]
        family.add_metric(labels, float(worker.state == router_pb2.WORKER_STATE_READY))
    return family


def _blocks(heard: Sequence[WorkerStats]) -> Metric:
    family = GaugeMetricFamily("kvferry_worker_blocks", "KV blocks by state.", labels=["worker", "role", "state"])
    for stats in heard:
        for state in _BLOCK_STATES:
            family.add_metric([stats.name, stats.role, state], getattr(stats, f"blocks_{state}"))
    return family


def _draft_acceptance(heard: Sequence[WorkerStats]) -> Metric:
    family = GaugeMetricFamily(
        "kvferry_worker_draft_acceptance_rate", "Drafts found right, since the start.", labels=["worker", "role"]
    )
    for stats in heard:
        if stats.num_draft_tokens:
            family.add_metric([stats.name, stats.role], stats.num_accepted_tokens / stats.num_draft_tokens)
    return family


def _peer_transports(heard: Sequence[WorkerStats]) -> Metric:
    labels = ["worker", "role", "peer", "transport"]
    family = GaugeMetricFamily("kvferry_worker_peer_transport", "1: KV goes to that peer by it.", labels=labels)
    names = {stats.incarnation: stats.name for stats in heard}
    for stats in heard:
        for peer in stats.peers:
            # One that is no more has no name, and may share its transport with the one that took its name.
            name = names.get(peer.incarnation, peer.incarnation)
            family.add_metric([stats.name, stats.role, name, peer.transport], 1)
    return family


def _each(family: GaugeMetricFamily | CounterMetricFamily, heard: Sequence[WorkerStats], field: str) -> Metric:
    for stats in heard:
        family.add_metric([stats.name, stats.role], getattr(stats, field))
    return family
