"""Same host first: a worker's host is what it tells, and how KV goes to it where that is known already."""

from __future__ import annotations

import asyncio

import pytest

from cluster.sim.loop import run
from protos.worker_pb2 import PeerStats, WorkerStats
from router.ranking import share_host
from tests.factories import GREEDY, prompt_of, sim_cluster


def on(node: str, incarnation: str, **peers: str) -> WorkerStats:
    ways = [PeerStats(incarnation=peer, transport=transport) for peer, transport in peers.items()]
    return WorkerStats(node=node, incarnation=incarnation, peers=ways)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (on("n", "a"), on("n", "b"), True),
        (on("n", "a"), on("m", "b"), False),
        # Two containers of one name, and two of one host.
        (on("n", "a", b="grpc"), on("n", "b"), False),
        (on("n", "a", b="shm"), on("m", "b"), True),
        (on("n", "a"), on("m", "b", a="shm"), True),
        # What it knows of a predecessor tells nothing.
        (on("n", "a", old="shm"), on("m", "b"), False),
    ],
)
def test_workers_share_a_host_if_memory_is_their_way_or_their_nodes_have_one_name(one, other, shared):
    assert share_host(one, other) is share_host(other, one) is shared


def test_both_halves_of_a_request_are_on_one_host_while_there_is_room():
    async def main() -> None:
        async with sim_cluster(2, 2, router={"policy": "topology"}) as cluster:
            for name, node in {"p0": "n", "d0": "m", "p1": "m", "d1": "n"}.items():
                tell, node_name = cluster.workers[name].stats, node

                def stats(tell=tell, node_name=node_name):
                    told = tell()
                    told.node = node_name
                    del told.peers[:]
                    return told

                cluster.workers[name].stats = stats  # type: ignore[method-assign]
            await asyncio.sleep(1.0)
            await asyncio.gather(*(cluster.ask(prompt_of(30, seed=i), GREEDY, f"r{i}") for i in range(6)))
            sent = {name: cluster.workers[name].stats().kv_bytes_sent for name in ("p0", "p1")}
            received = {name: cluster.workers[name].stats().kv_bytes_received for name in ("d0", "d1")}
            assert sent["p0"] == received["d1"] > 0
            assert sent["p1"] == received["d0"] > 0

    run(main())
