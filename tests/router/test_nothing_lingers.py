"""What a request has held is free when it ends, not when Python next looks for cycles: prompts and frames are large."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from cluster.sim.loop import run
from router.call import Call
from router.traces import Trace
from router.waits import Wait
from tests.factories import sim_cluster
from tests.router.test_prediction import ask
from workers.errors import AbortedError, ConflictError


@pytest.fixture
def no_looks() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_alive(cls: type) -> int:
    return sum(isinstance(thing, cls) for thing in gc.get_objects())


def test_the_message_that_brings_a_prompt_goes_with_its_request(no_looks: None) -> None:
    async def main() -> None:
        async with sim_cluster() as cluster:
            before = num_alive(Wait)
            for at in range(20):
                await ask(cluster, 10, f"r{at}", max_tokens=3)
            await asyncio.sleep(1)
            # It keeps the call, and that the message.
            assert num_alive(Wait) <= before + 2

    run(main())


def test_a_call_may_be_ended_twice_before_it_hears_of_it() -> None:
    async def main() -> None:
        call = Call(Trace("r", 1, 0.0))

        async def waiting() -> None:
            async with call.wait():
                await asyncio.sleep(3600)

        task = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        call.end(ConflictError("first"))
        await asyncio.sleep(0)
        call.end(AbortedError("second"))
        with pytest.raises(ConflictError, match="first"):
            await task

    run(main())
