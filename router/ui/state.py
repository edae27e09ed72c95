"""What the page at /ui is told, as JSON: GetStatus and GetActivity, bounded. Times are in seconds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from protos import router_pb2, worker_pb2
from router.phases import distinct_phases

BLOCK_STATES = ("in_use", "reserved", "quarantined", "cached", "free")
_STATES = {router_pb2.WORKER_STATE_READY: "ready", router_pb2.WORKER_STATE_UNREACHABLE: "unreachable"}
# The beginnings of what may be long.
_MAX_CHARS = 120


def cluster_object(status: router_pb2.GetStatusResponse) -> dict[str, Any]:
    router = status.routers[0]
    return {
        "cluster": status.name,
        "ready": status.ready,
        "reason": status.reason[:_MAX_CHARS],
        "models": list(status.served_model_names),
        "endpoints": {"http": status.http_endpoint, "grpc": status.grpc_endpoint},
        "router": {
            "name": router.name,
            "incarnation": router.incarnation,
            "queued": router.num_queued,
            "running": router.num_running,
            "policy": router.policy,
        },
        "workers": [_worker(worker) for worker in status.workers],
    }


def requests_object(activity: router_pb2.GetActivityResponse) -> dict[str, Any]:
    return {
        "time": activity.now_unix_s,
        "latency": {"ttft": _spread(activity.ttft), "tpot": _spread(activity.tpot)},
        "requests": [_request(trace) for trace in activity.traces],
    }


def worker_state(worker: router_pb2.WorkerStatus) -> str:
    """draining: it answers, and gets no new requests."""
    state = _STATES.get(worker.state, "unknown")
    return "draining" if state == "ready" and worker.draining else state


def _worker(worker: router_pb2.WorkerStatus) -> dict[str, Any]:
    stats = worker.stats
    return {
        "name": stats.name or worker.address,
        "role": stats.role,
        "state": worker_state(worker),
        "refused": worker.refused[:_MAX_CHARS],
        "address": worker.address,
        "node": stats.node,
        "incarnation": stats.incarnation,
        "blocks": [getattr(stats, f"blocks_{state}") for state in BLOCK_STATES],
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "waiting_for_kv": stats.num_waiting_for_kv,
        "prompt_tokens": stats.num_prompt_tokens_computed,
        "output_tokens": stats.num_output_tokens,
        "kv_sent": stats.kv_bytes_sent,
        "kv_received": stats.kv_bytes_received,
        "transports": _transports(stats),
    }


def _transports(stats: worker_pb2.WorkerStats) -> dict[str, int]:
    """To how many peers KV goes by each."""
    return dict(Counter(peer.transport for peer in stats.peers))


def _spread(spread: router_pb2.Spread) -> dict[str, float]:
    return {"count": spread.count, "p50": _s(spread.p50_s), "p99": _s(spread.p99_s)}


def _request(trace: router_pb2.Trace) -> dict[str, Any]:
    return {
        "id": trace.request_id,
        "tenant": trace.tenant,
        "arrived": _s(trace.arrived_unix_s),
        "elapsed": _s(trace.elapsed_s),
        "outcome": trace.outcome[:_MAX_CHARS],
        "prompt_tokens": trace.num_prompt_tokens,
        "tokens": trace.num_tokens,
        "ttft": _s(trace.ttft_s) if trace.HasField("ttft_s") else None,
        "tpot": _s(trace.tpot_s) if trace.HasField("tpot_s") else None,
        "num_tries": trace.num_tries,
        "tries": [_try(one) for one in trace.tries],
    }


def _try(one: router_pb2.Try) -> dict[str, Any]:
    return {
        "prefill": one.prefill,
        "decode": one.decode,
        "ended": _s(one.began_s + one.elapsed_s),
        "running": one.running,
        "error": one.error[:_MAX_CHARS],
        # Name, when it began after the request's arrival, how long it took; null: it goes on.
        "phases": [
            [phase.name, _s(phase.began_s), _s(phase.seconds) if phase.told else None] for phase in distinct_phases(one)
        ],
    }


def _s(seconds: float) -> float:
    """To the tenth of a millisecond."""
    return round(seconds, 4)
