"""Routers with durable jobs, each on a thread and a loop of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.config import JobsConfig
from tests.router.jobs import EchoRouter, Served, serving_jobs


class JobServer:
    """`router` answers what it has permits for."""

    def __init__(self, config: JobsConfig, num_permits: int) -> None:
        self.router = EchoRouter(permits=asyncio.Semaphore(num_permits))
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self.target = ""

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(10)

    def permit(self, count: int) -> None:
        def release() -> None:
            for _ in range(count):
                self.router.permits.release()

        self._loop.call_soon_threadsafe(release)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def stop(self) -> None:
        """To stop it again changes nothing."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._loop.close()

    async def _serve(self) -> None:
        served: Served
        async with serving_jobs(self.router, self._config) as served:
            self.target = f"127.0.0.1:{served.server.grpc_port}"
            self._started.set()
            await self._stop.wait()


@contextmanager
def job_server(config: JobsConfig, num_permits: int = 1_000_000) -> Iterator[JobServer]:
    server = JobServer(config, num_permits)
    server.start()
    try:
        yield server
    finally:
        server.stop()
