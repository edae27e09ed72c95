"""Several workers on one node, on real sockets: ports of their own, or a refusal that names the one in question."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.factories import make_worker
from workers.errors import ConfigError
from workers.rpc import GrpcNetwork
from workers.worker import Worker


def real_worker(port: int = 0) -> Worker:
    network: Any = GrpcNetwork()
    return make_worker(network, port=port)


def on_sockets(script: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(script())


def test_two_workers_do_not_share_a_port_and_the_second_says_which_is_taken():
    async def script() -> None:
        first = real_worker()
        port = int((await first.start()).rpartition(":")[2])
        second = real_worker(port)
        (refused,) = await asyncio.gather(second.start(), return_exceptions=True)
        if not isinstance(refused, Exception):
            await second.stop()
        await first.stop()
        assert isinstance(refused, ConfigError)
        assert f"cannot listen on 127.0.0.1:{port}: the port is in use" in refused.message
        # It is free again with the first gone.
        assert await second.start() == f"127.0.0.1:{port}"
        await second.stop()

    on_sockets(script)


def test_workers_that_take_any_port_take_different_ones():
    async def script() -> None:
        workers = [real_worker() for _ in range(4)]
        addresses = await asyncio.gather(*(worker.start() for worker in workers))
        assert len(set(addresses)) == 4
        assert [worker.address for worker in workers] == addresses
        for worker in workers:
            await worker.stop()

    on_sockets(script)
