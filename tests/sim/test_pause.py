"""A process that stands still: it neither answers nor dies, and wakes to all that was due in the meantime."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import Host, SimNetwork
from workers.rpc import add_bytes_method

Log = list[tuple[str, float]]


async def tick(log: Log) -> None:
    for _ in range(100):
        await asyncio.sleep(1.0)
        log.append(("tick", virtual_loop().time()))


async def serve(host: Host, log: Log) -> Any:
    """A channel of somebody else to a server on `host`, which notes what it is asked."""
    server = host.server()

    async def put(data: bytes) -> None:
        log.append((data.decode(), virtual_loop().time()))

    add_bytes_method(server, "Test", "Put", put)
    address = await host.listen(server, "127.0.0.1", 0)
    return host.network.host().connect(address).unary_unary("/Test/Put")


def test_nothing_of_a_paused_process_runs_and_everybody_else_does():
    async def main() -> None:
        host, mine, others = SimNetwork().host(), Log(), Log()
        ticking = [asyncio.create_task(host.run(tick(mine))), asyncio.create_task(tick(others))]
        await asyncio.sleep(2.5)
        host.pause()
        await asyncio.sleep(3.0)
        assert (len(mine), len(others)) == (2, 5)
        host.resume()
        await asyncio.sleep(1.2)
        # The tick that was due at 3 s comes on waking, and the next a second after that.
        assert [when for _, when in mine] == [1.0, 2.0, 5.5, 6.5]
        for task in ticking:
            task.cancel()
        await asyncio.gather(*ticking, return_exceptions=True)

    run(main())


def test_what_is_sent_to_a_paused_process_is_answered_when_it_wakes_or_not_at_all():
    async def main() -> None:
        host, log = SimNetwork().host(), Log()
        put = await serve(host, log)
        host.pause()
        waiting = asyncio.ensure_future(put(b"patient"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put(b"hurried", timeout=1.0)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.sleep(2.0)
        assert log == []
        host.resume()
        await waiting
        ((word, when),) = log
        assert word == "patient"
        assert when == pytest.approx(3.0, abs=0.1)

    run(main())


def test_what_a_process_sent_before_it_was_paused_arrives():
    async def main() -> None:
        network, log = SimNetwork(latency=lambda rng, num_bytes: 1.0), Log()
        receiver, sender = network.host(), network.host()
        put = await serve(receiver, log)
        from_sender: Any = sender.connect(next(iter(network.listening))).unary_unary("/Test/Put")

        async def send() -> None:
            await from_sender(b"word")

        sending = asyncio.create_task(sender.run(send()))
        await asyncio.sleep(0.5)
        sender.pause()
        await asyncio.sleep(9.5)
        assert log == [("word", 1.0)]
        assert not sending.done()
        sender.resume()
        await sending
        await put(b"end")

    run(main())


def test_a_timer_that_an_earlier_one_cancels_on_waking_does_not_go_off():
    async def main() -> None:
        host, log = SimNetwork().host(), Log()
        loop = virtual_loop()

        async def begin() -> None:
            second = loop.call_later(2.0, lambda: log.append(("second", loop.time())))
            loop.call_later(1.0, second.cancel)

        await host.run(begin())
        host.pause()
        await asyncio.sleep(5.0)
        host.resume()
        await asyncio.sleep(1.0)
        assert log == []

    run(main())


def test_a_process_paused_again_before_its_timers_were_due_keeps_them():
    async def main() -> None:
        host, log = SimNetwork().host(), Log()
        ticking = asyncio.create_task(host.run(tick(log)))
        for _ in range(3):
            await asyncio.sleep(0.1)
            host.pause()
            await asyncio.sleep(0.1)
            host.resume()
        await asyncio.sleep(0.5)
        assert [when for _, when in log] == [1.0]
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)

    run(main())


def test_a_process_can_be_killed_while_it_is_paused():
    async def main() -> None:
        host, log = SimNetwork().host(), Log()
        put = await serve(host, log)
        waiting = asyncio.ensure_future(put(b"word"))
        host.pause()
        await asyncio.sleep(1.0)
        host.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await waiting
        assert log == []

    run(main())
