"""Damaged, lost, late and repeated messages on the whole path, on the virtual clock: no answer changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.sim.loop import run
from cluster.sim.network import corrupt, delay, drop, duplicate
from tests.factories import SEEDED, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from tests.router.simulated import LONG, ask
from workers.errors import FrameError, StaleGrantError


@pytest.mark.parametrize("at", [0, 4, 20, 35, 60, -1])
def test_a_damaged_frame_is_never_an_answer(at):
    async def main() -> None:
        async with sim_cluster() as cluster:
            once = cluster.network.fault("Put", corrupt(at), skip=3, count=1)
            assert await cluster.ask(prompt_of(60), LONG) == expected_tokens(prompt_of(60), LONG)
            assert once.num_seen > 4
            cluster.network.fault("Put", corrupt(at))
            with pytest.raises((FrameError, StaleGrantError)):
                await cluster.ask(prompt_of(60), LONG)

    run(main())


@pytest.mark.parametrize("method", ["Put", "Commit", "Reserve", "Prefill", "Abort", "Renew", "GetStats"])
@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("fault", [drop, duplicate, delay(3.0)], ids=["lost", "twice", "late"])
def test_a_message_lost_late_or_sent_twice_changes_no_answer(method, answers, fault):
    """Whatever the fault does not reach ends by its deadline or lease."""

    async def main() -> None:
        settings = {"rpc_timeout_s": 2.0, "lease_s": 5.0}
        router = {"rpc_timeout_s": 2.0, "token_timeout_s": 8.0}
        async with sim_cluster(1, 2, router=router, idle_within_s=20.0, transfer=settings) as cluster:
            cluster.network.fault(method, fault, answers=answers, skip=1, count=1)
            tasks = [ask(cluster, length, replace(SEEDED, max_tokens=20)) for length in (6, 30, 50)]
            wanted = [expected_tokens(prompt_of(n), replace(SEEDED, max_tokens=20)) for n in (6, 30, 50)]
            assert await asyncio.gather(*tasks) == wanted

    run(main())


def test_outputs_sent_twice_reach_the_client_once():
    async def main() -> None:
        async with sim_cluster() as cluster:
            cluster.network.fault("StreamOutputs", duplicate, answers=True)
            assert await cluster.ask(prompt_of(20), LONG) == expected_tokens(prompt_of(20), LONG)

    run(main())


def test_outputs_that_get_lost_are_missed_and_asked_for_again():
    async def main() -> None:
        async with sim_cluster() as cluster:
            cluster.network.fault("StreamOutputs", drop, answers=True, skip=5, count=1)
            assert await cluster.ask(prompt_of(20), LONG) == expected_tokens(prompt_of(20), LONG)

    run(main())
