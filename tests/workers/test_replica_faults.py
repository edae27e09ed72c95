"""Copies of growing KV over a network that fails, and to a peer that dies."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.sim.network import Fault, corrupt, delay, drop, duplicate
from tests.factories import GREEDY, in_use, make_worker
from tests.workers.test_replicas import Two, on_two

FAULTS: dict[str, Fault] = {"lost": drop, "twice": duplicate, "late": delay(3.0), "damaged": corrupt(-1)}


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        *((method, fault) for method in ("ReserveReplica", "Commit", "Release") for fault in ("lost", "twice", "late")),
        *(("Put", fault) for fault in FAULTS),
    ],
)
@pytest.mark.parametrize("answers", [False, True])
def test_a_copy_whose_messages_get_lost_comes_late_or_never_but_right(method, fault, answers):
    if fault == "damaged" and answers:
        return  # Empty.

    async def script(two: Two) -> None:
        two.network.fault(method, FAULTS[fault], answers=answers, skip=1, count=2)
        requests = [two.submit(length, replace(GREEDY, max_tokens=100)) for length in (10, 30)]
        await two.end_of(*requests)
        await asyncio.sleep(3.5)
        assert all(two.num_copied(request) > 15 for request in requests)

    settings = {"rpc_timeout_s": 1.0, "lease_s": 2.0}
    on_two(script, idle_within_s=4.0, transfer=settings, num_gpu_blocks_override=200, step_s=lambda batch: 0.04)


def test_a_peer_that_dies_harms_nobody_and_the_next_one_there_gets_everything():
    async def script(two: Two) -> None:
        request = two.submit(30, replace(GREEDY, max_tokens=120))
        await two.until(lambda: request.num_output_tokens > 20)
        port = int(two.peer.address.rsplit(":", 1)[1])
        two.network.kill(two.peer.address)
        await two.peer.stop()
        await two.until(lambda: request.num_output_tokens > 40)
        two.peer = make_worker(two.network.host(), incarnation="c" * 32, port=port, **two.settings)
        await two.peer.start()
        await two.end_of(request)
        await two.until(lambda: not in_use(two.worker))
        assert two.num_copied(request) > 30

    on_two(script, step_s=lambda batch: 0.05)
