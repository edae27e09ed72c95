"""Several workers on one node, on real sockets: ports of their own, or a refusal that names the one in question."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

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
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"):
            await real_worker(port).start()
        # The first is as it was, and the port is free when it is gone.
        assert first.stats().blocks_total == 64
        await first.stop()
        again = real_worker(port)
        assert await again.start() == f"127.0.0.1:{port}"
        await again.stop()

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
