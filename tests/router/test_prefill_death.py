"""A prefill worker that dies at any step of a hand-off: its prompt goes elsewhere, and decode has its room back long
before a lease is over."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import drop
from tests.factories import GREEDY, LEASE_S, SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected_tokens

PARAMS = replace(GREEDY, max_tokens=20)


def dies_when(cluster: SimCluster, method: str, nth: int) -> None:
    """The prefill worker dies as this message of its, or to it, is on its way, and takes it along."""

    def die(data: bytes) -> tuple[()]:
        cluster.hosts["p0"].kill()
        return ()

    cluster.network.fault(method, die, skip=nth, count=1)


async def replace_unknown_to_prefill(cluster: SimCluster, name: str) -> None:
    """By one that no prefill worker connects to before it has KV for it."""
    cluster.network.fault("ConnectPeer", drop)
    await cluster.kill(name)
    await cluster.replace(name)
    await asyncio.sleep(0.7)


@pytest.mark.parametrize(
    ("method", "nth"), [("Prefill", 0), ("Connect", 0), ("Put", 0), ("Put", 3), ("Put", 7), ("Commit", 0)]
)
@pytest.mark.parametrize("num_prefill", [2, 1])
def test_its_prompt_is_answered_by_who_is_there_and_decode_keeps_no_room_for_it(method, nth, num_prefill):
    async def main() -> None:
        # Room that waits for a lease would still be taken half a second after the last answer.
        async with sim_cluster(num_prefill, 1) as cluster:
            if method == "Connect":
                await replace_unknown_to_prefill(cluster, "d0")
            dies_when(cluster, method, nth)
            asking = asyncio.create_task(cluster.ask(prompt_of(70), PARAMS))
            while cluster.hosts["p0"].alive:  # noqa: ASYNC110  The network's doing.
                await asyncio.sleep(0.001)
            await cluster.kill("p0")
            if num_prefill == 1:
                await asyncio.sleep(1.0)
                assert not cluster.workers["d0"].engine.scheduler.num_blocks_reserved
                await cluster.replace("p0")
            assert await asking == expected_tokens(prompt_of(70), PARAMS)
            assert virtual_loop().time() < LEASE_S / 2

    run(main())
