"""The receiving process: one decode worker for each way, and what the bare contestants send to."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cluster.bench.transfer.workers import PoolRunner, Way, start_worker, worker_config
from workers.rpc import GrpcNetwork, add_bytes_method

BARE_SERVICE, BARE_METHOD = "kvferry.bench", "Put"
# What a receiver of the raw socket answers to each message of `num_bytes`, sent before as 8 bytes.
ACKNOWLEDGEMENT = b"k"

# nixl: with kvferry[nixl] only.
WAYS = {
    "shm": Way("shm"),
    "shm without checksum": Way("shm", checksum=False),
    "shm with TLS": Way("shm", tls=True),
    "grpc": Way("grpc"),
    "grpc without checksum": Way("grpc", checksum=False),
    "grpc with TLS": Way("grpc", tls=True),
    "gloo": Way("gloo"),
} | ({"nixl": Way("nixl")} if find_spec("nixl") else {})


@contextmanager
def in_another_process(serve: Callable[[Connection], Any]) -> Iterator[dict[str, str]]:
    """The addresses that `serve` sends first, while the process that runs it lives: until its connection is closed."""
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    process = spawning.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        here.close()
        process.join(timeout=10)
        process.kill()


def pin(core: int) -> None:
    """To the first (0) or the last (-1) core that this process may use."""
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[core]])


def serve_bench(certificates: Path, connection: Connection) -> None:
    """The other core's process. Its end is that of the connection, also when who started it was killed."""
    pin(-1)
    asyncio.run(_serve(certificates, connection))


async def _serve(certificates: Path, connection: Connection) -> None:
    runner = PoolRunner()
    workers = {
        name: await start_worker(worker_config("decode", way, certificates), runner) for name, way in WAYS.items()
    }
    network = GrpcNetwork()
    server = network.server()
    add_bytes_method(server, BARE_SERVICE, BARE_METHOD, _take)
    addresses = {name: worker.address for name, worker in workers.items()}
    addresses["bare grpc"] = await network.listen(server, "127.0.0.1", 0)
    addresses["socket"] = _listen()
    connection.send(addresses)
    await until_closed(connection)
    await server.stop(None)
    for worker in workers.values():
        await worker.stop()


async def until_closed(connection: Connection) -> None:
    with suppress(EOFError):
        await asyncio.get_running_loop().run_in_executor(None, connection.recv)


async def _take(data: bytes) -> None:
    """What the bare gRPC loop does with a frame: nothing."""


def _listen() -> str:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_drain, args=(listener,), daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _drain(listener: socket.socket) -> None:
    peer, _ = listener.accept()
    room = bytearray(4 << 20)
    while size := peer.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(size, "little")
        while left:
            left -= peer.recv_into(room, min(left, len(room)))
        peer.sendall(ACKNOWLEDGEMENT)
