"""Clients that go away, and what is heard late of earlier tries, on the whole path, on the virtual clock."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import corrupt, delay
from tests.factories import prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from tests.router.simulated import LONG, PLACES, ask
from workers.backoff import pause_s


@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.001, 0.003, 0.007, 0.012, 0.02, 0.05, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("place", PLACES)
def test_a_client_that_goes_away_at_any_moment_frees_both_sides_at_once(after_s, place):
    async def main() -> None:
        async with sim_cluster(*PLACES[place]) as cluster:
            tasks = [ask(cluster, length, LONG, f"r{length}") for length in (20, 60)]
            await asyncio.sleep(after_s)
            tasks[0].cancel()
            assert await tasks[1] == expected_tokens(prompt_of(60), LONG)
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]

    run(main())


@pytest.mark.parametrize("count", [1, 2, 10])
def test_closing_the_stream_between_two_tokens_aborts_the_request(count):
    async def main() -> None:
        async with sim_cluster() as cluster:
            async with aclosing(cluster.router.generate(prompt_of(20), LONG, "r")) as stream:
                async for output in stream:
                    if output.index + 1 == count:
                        break
            await asyncio.sleep(0.05)
            assert cluster.busy() == {}

    run(main())


def test_an_abort_of_an_earlier_attempt_that_comes_late_does_not_end_the_next():
    async def main() -> None:
        async with sim_cluster(router={"token_timeout_s": 30.0}) as cluster:
            cluster.network.fault("Abort", delay(0.3))
            cluster.network.fault("Put", corrupt(-1), count=1)
            began = virtual_loop().time()
            assert await cluster.ask(prompt_of(20), LONG) == expected_tokens(prompt_of(20), LONG)
            assert virtual_loop().time() - began < 5.0

    run(main())


def test_a_failure_of_an_earlier_attempt_that_is_heard_of_late_does_not_end_the_next():
    async def main() -> None:
        async with sim_cluster(router={"max_attempts": 2}) as cluster:
            # When the second try has begun and has no token yet.
            late_s = pause_s(0.2, 1, "r 0") + 0.01
            cluster.network.fault("StreamOutputs", delay(late_s), answers=True, count=1)
            cluster.network.fault("Put", corrupt(-1), count=1)
            assert await cluster.ask(prompt_of(20), LONG) == expected_tokens(prompt_of(20), LONG)
            assert cluster.router._num_attempts == 2

    run(main())
