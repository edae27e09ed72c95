"""Outputs on their way to routers: one message a step, kept for a lease, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from cluster.sim.loop import run
from workers.outputs import OutputStreams
from workers.request import TokenOutput

LEASE_S = 10.0


def output(index: int, router: str = "a", request: str = "r") -> TokenOutput:
    return TokenOutput(request, index, (index,), router_id=router)


class Stage:
    def __init__(self) -> None:
        self.lost: list[str] = []
        self.streams = OutputStreams(LEASE_S, self.lost.append)
        self.seen: list[list[int]] = []

    async def read(self, router: str = "a") -> None:
        async with aclosing(self.streams.stream(router)) as steps:
            async for step in steps:
                self.seen.append([o.index for o in step])


def on_stage(script: Callable[[Stage], Awaitable[Any]]) -> None:
    async def main() -> None:
        stage = Stage()
        await script(stage)
        stage.streams.close()

    run(main())


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_step_is_one_message_for_each_router():
    async def script(stage: Stage) -> None:
        reading = asyncio.create_task(stage.read())
        await asyncio.sleep(1)
        stage.streams.publish([output(0), output(7, "b"), output(1)])
        stage.streams.publish([output(2)])
        stage.streams.publish([])
        await asyncio.sleep(1)
        assert stage.seen == [[0, 1], [2]]
        await cancel(reading)

    on_stage(script)


def test_what_comes_before_the_stream_is_kept_and_a_reopened_stream_goes_on_where_the_last_ended():
    async def script(stage: Stage) -> None:
        stage.streams.publish([output(0)])
        await asyncio.sleep(LEASE_S - 1)
        reading = asyncio.create_task(stage.read())
        await asyncio.sleep(LEASE_S * 3)
        stage.streams.publish([output(1)])
        await asyncio.sleep(0.001)
        await cancel(reading)
        stage.streams.publish([output(2)])
        await asyncio.sleep(LEASE_S - 1)
        reading = asyncio.create_task(stage.read())
        await asyncio.sleep(LEASE_S * 2)
        assert (stage.seen, stage.lost) == ([[0], [1], [2]], [])
        await cancel(reading)

    on_stage(script)


def test_a_second_stream_of_a_router_ends_its_first():
    async def script(stage: Stage) -> None:
        first = asyncio.create_task(stage.read())
        await asyncio.sleep(1)
        second = asyncio.create_task(stage.read())
        await asyncio.wait_for(first, 1.0)
        stage.streams.publish([output(0)])
        await asyncio.sleep(LEASE_S * 2)
        assert (stage.seen, stage.lost) == ([[0]], [])
        await cancel(second)

    on_stage(script)


def test_a_router_that_never_opens_a_stream_is_lost_after_one_lease():
    async def script(stage: Stage) -> None:
        stage.streams.expect("a")
        await asyncio.sleep(LEASE_S / 2)
        stage.streams.expect("a")
        stage.streams.publish([output(0)])
        await asyncio.sleep(LEASE_S / 2 - 0.001)
        assert stage.lost == []
        await asyncio.sleep(0.002)
        assert stage.lost == ["a"]
        # What it had is gone: a stream after that has nothing old to tell.
        reading = asyncio.create_task(stage.read())
        await asyncio.sleep(1)
        assert stage.seen == []
        await cancel(reading)

    on_stage(script)


def test_a_router_is_lost_one_lease_after_its_stream_broke_and_again_after_it_came_back():
    async def script(stage: Stage) -> None:
        for times in (1, 2):
            reading = asyncio.create_task(stage.read())
            await asyncio.sleep(1)
            await cancel(reading)
            await asyncio.sleep(LEASE_S - 0.001)
            assert len(stage.lost) == times - 1
            await asyncio.sleep(0.002)
            assert stage.lost == ["a"] * times

    on_stage(script)


def test_a_reader_that_falls_too_far_behind_is_lost_rather_than_kept_for():
    async def script(stage: Stage) -> None:
        stage.streams.expect("a")
        for index in range(10_001):
            stage.streams.publish([output(index)])
        assert stage.lost == ["a"]

    on_stage(script)
