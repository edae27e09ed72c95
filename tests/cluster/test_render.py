"""What `kvferry status` prints of the ways that KV takes."""

from __future__ import annotations

from rich.console import Console

from cluster.render import status_object, status_table, status_title
from protos import router_pb2, worker_pb2


def kv_by(**peers: str) -> str:
    """The last cell of a prefill worker's row: its peers' incarnations, and how KV goes to each."""
    sender = worker_pb2.WorkerStats(name="prefill-0", role="prefill", incarnation="p")
    for incarnation, transport in peers.items():
        address = f"h:{incarnation}"
        sender.peers.add(incarnation=incarnation, transport=transport, address=address, checksum=True)
    known = [sender, *(worker_pb2.WorkerStats(name=f"decode-{i}", incarnation=i) for i in "ab")]
    status = router_pb2.GetStatusResponse(workers=[router_pb2.WorkerStatus(stats=stats) for stats in known])
    console = Console(width=200)
    with console.capture() as captured:
        console.print(status_table(status))
    row = next(line for line in captured.get().splitlines() if line.startswith("prefill-0"))
    return row.split(" 0 ")[-1].strip()


def test_one_way_to_all_peers_is_one_word():
    assert kv_by() == "-"
    assert kv_by(a="grpc", b="grpc") == "grpc"


def test_different_ways_are_told_peer_by_peer():
    assert kv_by(a="shm", b="grpc", c="shm") == "shm to decode-a h:c, grpc to decode-b"


def test_the_policy_and_how_many_blocks_it_knows_are_shown():
    router = router_pb2.RouterStatus(name="router-0", policy="prefix_aware", num_indexed_blocks=12)
    status = router_pb2.GetStatusResponse(name="k", ready=True, routers=[router])
    assert "router-0 routes by prefix_aware, 12 blocks known" in status_title(status)
    (shown,) = status_object(status)["routers"]
    assert (shown["policy"], shown["num_indexed_blocks"]) == ("prefix_aware", 12)


def test_who_drains_and_who_was_flipped_is_seen():
    workers = [
        router_pb2.WorkerStatus(
            stats=worker_pb2.WorkerStats(name=name, role=role, num_running=1),
            state=router_pb2.WORKER_STATE_READY,
            draining=draining,
        )
        for name, role, draining in (("prefill-0", "prefill", False), ("prefill-1", "decode", True))
    ]
    status = router_pb2.GetStatusResponse(workers=workers)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(status_table(status))
    rows = [line.split() for line in captured.get().splitlines() if line.startswith("prefill-")]
    assert [row[: row.index("0")] for row in rows] == [
        ["prefill-0", "ready"],
        ["prefill-1", "draining", "as", "decode"],
    ]
    told = status_object(status)
    assert [worker["state"] for worker in told["workers"]] == ["ready", "draining"]
    assert told["totals"]["num_running"] == 2
