"""The virtual clock: time passes only when everybody waits, and nothing is left behind unseen."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import time

import pytest

from cluster.sim.loop import VirtualTimeError, run, virtual_loop


def test_an_hour_takes_no_time_and_timers_go_off_in_order():
    seen = []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, virtual_loop().time()))

    async def main() -> None:
        await asyncio.gather(*(wait(s) for s in (3000.0, 0.001, 60.0, 0.0)))

    began = time.monotonic()
    run(main())
    assert seen == [(s, s) for s in (0.0, 0.001, 60.0, 3000.0)]
    assert time.monotonic() - began < 1


def test_timeouts_happen_at_their_instant():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.25):
                await asyncio.Event().wait()
        return virtual_loop().time()

    assert run(main()) == 7.25


def test_a_deadlock_is_an_error_that_says_who_waits_where():
    async def stuck_here() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(stuck_here(), name="patient")

    with pytest.raises(VirtualTimeError, match=r"(?s)deadlock.*patient > .*stuck_here"):
        run(main())


def test_endless_timers_and_endless_spinning_reach_a_limit(monkeypatch):
    async def tick() -> None:
        while True:  # noqa: ASYNC110  Endless is the point.
            await asyncio.sleep(1.0)

    async def spin() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(VirtualTimeError, match="not over at 101"):
        run(tick(), limit_s=100)
    monkeypatch.setattr("cluster.sim.loop._MAX_TURNS", 1000)
    with pytest.raises(VirtualTimeError, match="not over at 0"):
        run(spin())


def test_a_task_left_running_is_reported_and_ended():
    ended = []

    async def background() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(True)

    async def main() -> None:
        virtual_loop().kept = asyncio.create_task(background(), name="forgotten")  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    with pytest.raises(VirtualTimeError, match=r"forgotten .*is not over"):
        run(main())
    assert ended == [True]


@pytest.mark.parametrize("seen", [True, False])
def test_an_error_that_nobody_looked_at_is_reported(seen):
    async def fail() -> None:
        raise ValueError("lost")

    async def main() -> None:
        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        if seen:
            assert isinstance(task.exception(), ValueError)

    if seen:
        run(main())
    else:
        with pytest.raises(VirtualTimeError, match="lost"):
            run(main())


def test_an_error_in_a_timer_is_reported():
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(2)

    with pytest.raises(VirtualTimeError, match="ZeroDivisionError"):
        run(main())


def test_the_error_of_main_comes_through_as_it_is():
    async def main() -> None:
        asyncio.get_running_loop().call_later(50, print)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main())


def test_threads_and_sockets_are_refused():
    async def thread() -> None:
        await asyncio.to_thread(time.sleep, 0)

    async def executor() -> None:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            await asyncio.get_running_loop().run_in_executor(pool, print)

    async def listen() -> None:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            await asyncio.start_server(lambda r, w: None, sock=server)

    for main in (thread, executor, listen):
        with pytest.raises(VirtualTimeError, match="real clock"):
            run(main())


def test_the_seed_decides_the_loops_random_numbers():
    async def main() -> list[float]:
        return [virtual_loop().random.random() for _ in range(3)]

    assert run(main(), seed=1) == run(main(), seed=1)
    assert run(main(), seed=1) != run(main(), seed=2)
