"""The processes of the benchmark: each pinned to a core, and asked for the CPU seconds that it has used."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import uvicorn

from cluster.bench.router import empty_app, stub_workers
from workers.garbage import spare_what_is_loaded

Serve = Callable[..., Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Served:
    """A process at work."""

    # What it said when it was ready: its port, or its addresses.
    said: Any
    pid: int

    def cpu_s(self) -> float:
        """Of all its threads, since its start."""
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def process(core: int, serve: Serve, *arguments: Any) -> Iterator[Served]:
    """Run `serve(*arguments, pipe)` in a process of its own."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_run, args=(core, serve, arguments, theirs))
    child.start()
    try:
        assert child.pid is not None
        yield Served(ours.recv(), child.pid)
    finally:
        ours.send("stop")
        child.join(10)
        child.kill()


def _run(core: int, serve: Serve, arguments: tuple[Any, ...], pipe: Connection) -> None:
    os.sched_setaffinity(0, {core})
    asyncio.run(serve(*arguments, pipe))


async def serve_stubs(step_s: float, pipe: Connection) -> None:
    await stub_workers.serve(step_s, pipe)


async def serve_router(addresses: list[str], pipe: Connection) -> None:
    """The real router over these workers, as `kvferry up` starts it."""
    from cluster.config import load_config
    from router.server import Identity, serve
    from workers.models.resolve import resolve_model
    from workers.tokenizer import load_tokenizer

    config = load_config(None)
    settings = config.router.model_copy(update={"http_port": 0, "grpc_port": 0})
    tokenizer = load_tokenizer(resolve_model(config.model))
    serving = await serve(Identity(), settings, config, tokenizer, addresses)
    spare_what_is_loaded()
    pipe.send(serving.server.http_port)
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    await serving.stop()


async def serve_empty_app(step_s: float, pipe: Connection) -> None:
    """FastAPI alone, on the router's uvicorn, and spared the garbage collector's looks as much as the router."""
    from router.server import listen, server_of

    listener = listen("127.0.0.1", 0)
    steps = empty_app.Steps(step_s)
    stepping = asyncio.create_task(steps.run())
    server: uvicorn.Server = server_of(empty_app.build(steps), timeout_s=60.0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    spare_what_is_loaded()
    pipe.send(listener.getsockname()[1])
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    server.should_exit = True
    await serving
    stepping.cancel()
