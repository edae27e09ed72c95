"""What the router shows Prometheus of its workers."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from protos import router_pb2, worker_pb2
from router.metrics import RouterMetrics


class Load:
    num_queued = 0
    num_running = 0
    num_retries: ClassVar[Counter[str]] = Counter()


def status(name: str, role: str, **peers: str) -> router_pb2.WorkerStatus:
    """A worker whose KV goes to each incarnation by that transport."""
    stats = worker_pb2.WorkerStats(name=name, role=role, incarnation=f"{name}_i")
    stats.peers.extend(worker_pb2.PeerStats(incarnation=i, transport=transport) for i, transport in peers.items())
    return router_pb2.WorkerStatus(address="h:1", state=router_pb2.WORKER_STATE_READY, stats=stats)


def test_the_transport_to_each_peer_is_shown_by_the_peers_name():
    metrics = RouterMetrics("m")
    workers = [
        status("prefill_0", "prefill", decode_0_i="shm", decode_1_i="grpc", gone="gloo"),
        status("decode_0", "decode"),
        status("decode_1", "decode"),
    ]
    metrics.watch(Load(), lambda: workers)
    lines = [line for line in metrics.exposition().decode().splitlines() if "peer_transport{" in line]
    assert lines == [
        f'kvferry_worker_peer_transport{{peer="{peer}",role="prefill",transport="{transport}",worker="prefill_0"}} 1.0'
        for peer, transport in (("decode_0", "shm"), ("decode_1", "grpc"), ("gone", "gloo"))
    ]
