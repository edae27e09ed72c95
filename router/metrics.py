"""What the router counts, for Prometheus. Suffixes of metric names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos import router_pb2
from router.histogram import Histogram, Tally
from router.vllm_metrics import VllmNames
from router.worker_metrics import WorkerMetrics
from workers.request import FinishReason, SamplingParams
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

# Field of Timeline: the histogram of that phase, and what it says.
_PHASES = {
    "queued_s": ("request_queue_time_seconds", "Seconds in the router's queue."),
    "prefill_queued_s": ("request_prefill_queue_time_seconds", "Seconds at the prefill worker before its first step."),
    "prefill_s": ("request_prefill_time_seconds", "Seconds from the first step to token 1."),
    "transfer_s": ("request_transfer_time_seconds", "Seconds that KV was on its way, which overlaps prefill."),
    "transfer_unhidden_s": (
        "request_transfer_unhidden_time_seconds",
        "Seconds of the transfer that prefill did not hide.",
    ),
    "decode_queued_s": ("request_decode_queue_time_seconds", "Seconds at the decode worker before its first step."),
    "decode_s": ("request_decode_time_seconds", "Seconds from the decode worker's first step to the last token."),
}
_LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_CHOICE_BUCKETS = (1, 2, 5, 10, 20)


class Load(Protocol):
    """What of the router is shown: requests that wait for a worker, and that have one; tries that were not the last."""

    @property
    def num_queued(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_retries(self) -> Mapping[str, int]: ...


class RouterMetrics:
    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._vllm: CollectorRegistry | None = None
        self._model_name = model_name
        self._ttft = self._histogram("time_to_first_token_seconds", "Seconds from arrival to token 1.", _TTFT_BUCKETS_S)
        self._gap = self._histogram(
            "inter_token_latency_seconds", "Seconds between the outputs of a request, per token.", _TOKEN_BUCKETS_S
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Seconds, (E2E - TTFT) / (N - 1) of a request.", _TOKEN_BUCKETS_S
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Seconds from arrival to the last token.", _REQUEST_BUCKETS_S
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "Seconds of prefill and decode together.", _REQUEST_BUCKETS_S
        )
        self._phases = {field: self._histogram(name, text, _TTFT_BUCKETS_S) for field, (name, text) in _PHASES.items()}
        self._lengths = [
            self._histogram("request_prompt_tokens", "Tokens of a prompt.", _LENGTH_BUCKETS),
            self._histogram("request_generation_tokens", "Tokens of an answer.", _LENGTH_BUCKETS),
            self._histogram("request_params_max_tokens", "Tokens that an answer might have had.", _LENGTH_BUCKETS),
            self._histogram("request_params_n", "Answers that a request asked for.", _CHOICE_BUCKETS),
        ]
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = Tally("kvferry_generation_tokens", "Output tokens.", model_name, self.registry)
        self._success = Counter(
            "kvferry_request_success", "Requests ended.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._job_prompts = Counter(
            "kvferry_job_prompts", "Prompts of jobs answered.", ["model_name", "outcome"], registry=self.registry
        )
        self._job_seconds = self._histogram(
            "job_prompt_seconds", "Seconds of the try that answered a prompt of a job.", _REQUEST_BUCKETS_S
        )
        self._errors = Counter(
            "kvferry_request_errors", "Requests failed.", ["model_name", "type"], registry=self.registry
        )
        self._planner_decisions = Counter(
            "kvferry_planner_decisions", "Decisions of the planner.", ["kind"], registry=self.registry
        )

    def watch(self, load: Load, workers: Callable[[], Sequence[router_pb2.WorkerStatus]]) -> None:
        """Show the router's load and its workers' latest statistics too."""
        self.registry.register(_Live(load, self._model_name))
        self.registry.register(WorkerMetrics(workers))

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
        self._inference.observe(timeline.prefill_s + timeline.decode_s)
        for field, histogram in self._phases.items():
            histogram.observe(getattr(timeline, field))

    def lengths(self, num_prompt_tokens: int, num_tokens: int, params: SamplingParams) -> None:
        """Of an answer that has ended."""
        values = (num_prompt_tokens, num_tokens, params.max_tokens or num_tokens, params.n)
        for histogram, value in zip(self._lengths, values, strict=True):
            histogram.observe(value)

    def failed(self, error_type: str) -> None:
        self._errors.labels(self._model_name, error_type).inc()

    def job_prompt(self, failed: bool, seconds: float) -> None:
        """Answered, if only with an error, by a try that took so long."""
        self._job_prompts.labels(self._model_name, "failed" if failed else "done").inc()
        self._job_seconds.observe(seconds)

    def planned(self, kind: str) -> None:
        """The planner decided something, or would have."""
        self._planner_decisions.labels(kind).inc()

    def add_vllm_names(self) -> None:
        """From now on, what vLLM has too is there under its name as well."""
        self._vllm = CollectorRegistry()
        self._vllm.register(VllmNames(self.registry, self._model_name))

    def exposition(self) -> bytes:
        return generate_latest(self.registry) + (generate_latest(self._vllm) if self._vllm else b"")

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"kvferry_{name}", text, self._model_name, buckets, self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"kvferry_{name}", text, ["model_name"], registry=self.registry).labels(self._model_name)


class _Live(Collector):
    """Read at each scrape: no copy that could be stale."""

    def __init__(self, load: Load, model_name: str) -> None:
        self._load = load
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield _gauge("num_requests_running", "Requests that have a worker.", self._load.num_running)
        yield _gauge("num_requests_waiting", "Requests that wait for a worker.", self._load.num_queued)
        text = "Tries at a request that failed and were followed by another, by the class of the error."
        retries = CounterMetricFamily("kvferry_handoff_retries", text, labels=["model_name", "reason"])
        for reason, count in sorted(self._load.num_retries.items()):
            retries.add_metric([self._model_name, reason], count)
        yield retries


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvferry_{name}", text, value=value)
