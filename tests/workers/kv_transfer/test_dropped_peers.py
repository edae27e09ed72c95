"""A peer that was dropped, because another incarnation is at its address, while hand-offs to it are under way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.sim.loop import run
from cluster.sim.network import drop
from protos import kv_transfer_pb2 as pb
from tests.factories import GREEDY, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from tests.workers.kv_transfer.test_peers import NEW, OLD, Stage, on_stage
from tests.workers.kv_transfer.unsent import unsent
from workers.errors import UnavailableError
from workers.kv_transfer.frame import Frame


@pytest.mark.parametrize("what", ["send", "commit", "release", "renew"])
def test_whatever_is_said_to_it_is_a_typed_error(what):
    async def script(stage: Stage) -> None:
        old = await stage.peers.get(stage.grant(OLD))
        await stage.decode.stop()
        await stage.launch()
        await stage.peers.get(stage.grant(NEW))
        ways = {
            "send": lambda: old.send(old.pack(unsent(Frame(1, OLD, 0, 1, 0, 1, bytes(2))))),
            "commit": lambda: old.commit(pb.CommitRequest(grant_id=1, incarnation=OLD)),
            "release": lambda: old.release(1, ""),
            "renew": lambda: old.renew([1], 1.0),
        }
        with pytest.raises(UnavailableError, match="another incarnation"):
            await ways[what]()

    on_stage(script)


def test_a_hand_off_that_was_waiting_for_it_ends_without_a_trace():
    async def main() -> None:
        async with sim_cluster(idle_within_s=15.0) as cluster:
            # Its frame gets no answer, its worker dies, and another hand-off finds the next one at the address.
            cluster.network.fault("Put", drop, answers=True, count=1)
            short = replace(GREEDY, max_tokens=1)
            assert await cluster.ask(prompt_of(1), short, "first") == expected_tokens(prompt_of(1), short)
            await asyncio.sleep(1.0)
            assert cluster.busy()
            await cluster.kill("d0")
            await cluster.replace("d0")
            await asyncio.sleep(1.0)
            assert await cluster.ask(prompt_of(2), GREEDY, "second") == expected_tokens(prompt_of(2), GREEDY)

    run(main())
