"""A worker's own /metrics: the first free port from telemetry.metrics_port on."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from cluster import worker_port
from cluster.worker_port import MetricsPort
from router.server import listen
from tests.factories import make_config
from tests.fake_model import HashRunner
from workers.engine.executor import Executor
from workers.errors import ConfigError
from workers.worker import Worker


def some_worker() -> Worker:
    return Worker(make_config(name="d0", role="decode"), make_executor=lambda config: Executor(HashRunner(config)))


def free_ports() -> int:
    """The first of two that nobody has, one after the other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
        return port


def test_workers_of_a_host_take_one_port_after_the_other():
    async def main() -> None:
        port = free_ports()
        workers = [some_worker(), some_worker()]
        for one in workers:
            await one.start()
        ports = [MetricsPort(one, port) for one in workers]
        assert [one.metrics_address for one in workers] == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
        assert workers[1].stats().metrics_address == f"127.0.0.1:{port + 1}"
        async with httpx.AsyncClient() as client:
            for one in workers:
                text = (await client.get(f"http://{one.metrics_address}/metrics")).text
                assert "kvferry_worker_up{" in text
        for open_port in ports:
            await open_port.close()
        listen("127.0.0.1", port).close()
        for one in workers:
            await one.stop()

    asyncio.run(main())


def test_without_a_free_port_it_is_an_error_that_names_the_key(monkeypatch):
    monkeypatch.setattr(worker_port, "_MAX_PORTS", 1)

    async def main() -> None:
        worker = some_worker()
        await worker.start()
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as raised:
            MetricsPort(worker, taken.getsockname()[1])
        assert raised.value.param == "telemetry.metrics_port"
        await worker.stop()

    asyncio.run(main())
