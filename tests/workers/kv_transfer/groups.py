"""A receiver and a sender on one group of torch.distributed, over real sockets."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

from tests.workers.kv_transfer.unsent import send_frame, verify, whole
from workers.errors import StaleGrantError
from workers.kv_transfer.frame import Buffer, Frame, decode
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.nccl import GroupSession, NcclTransport
from workers.kv_transfer.pair_group import Gloo
from workers.kv_transfer.sessions import SessionSender
from workers.rpc import GrpcNetwork

SENDER, RECEIVER, OTHER = "a" * 32, "b" * 32, "c" * 32
TIMEOUT_S = 20.0


def frame(number: int = 7, payload: bytes = b"KV" * 1000) -> Frame:
    return Frame(number, RECEIVER, 0, 2, 0, 4, payload)


class Receiver:
    """Takes frames of request "r" while it is open; those of grant 99 are stale."""

    def __init__(self) -> None:
        self.received: dict[int, bytes] = {}
        self.num_waiting = 0
        self.open = asyncio.Event()
        self.open.set()

    async def receive(self, data: Buffer, elsewhere: KVRows | None = None) -> None:
        found, checksum = decode(whole(data, elsewhere))
        if found.grant_id == 99:
            raise StaleGrantError("no more")
        verify(found, checksum, "r")
        self.num_waiting += 1
        await self.open.wait()
        self.received[found.grant_id] = bytes(found.payload)


class Stage:
    """A receiver behind a gRPC server, and a sender to it."""

    def __init__(self, incarnation: str = RECEIVER) -> None:
        self.network = GrpcNetwork()
        self.receiver = Receiver()
        self.transport = NcclTransport(Gloo(), self.network, incarnation)
        self._server = self.network.server()
        self.transport.serve(self.receiver, self._server)

    async def start(self, port: int = 0) -> None:
        self.address = await self.network.listen(self._server, "127.0.0.1", port)
        self.sender = self.sender_from(NcclTransport(Gloo(), self.network, SENDER))

    def sender_from(self, transport: NcclTransport) -> SessionSender:
        return transport.sender(self.address, RECEIVER)

    async def outgoing(self) -> GroupSession:
        """The sender's group, once frame 0 has gone through it."""
        await send_frame(self.sender, frame(0), "r", TIMEOUT_S)
        assert isinstance(self.sender._session, GroupSession)
        return self.sender._session

    @property
    def pairs(self) -> list[str]:
        """The groups that the receiver has."""
        return [str(pair) for pair in self.transport._incoming]

    async def stop(self) -> None:
        await self.sender.close()
        await self._server.stop(None)


def group_threads() -> set[int]:
    """Threads of groups and stores in this process: torch's, by the names that Linux knows, and ours."""
    threads = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("kv-gloo")} - {None}
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if path.read_text().startswith(("gloo_", "pt_")):
                threads.add(int(path.parent.name))
    return cast("set[int]", threads)


@asynccontextmanager
async def no_thread_left() -> AsyncIterator[Callable[[], bool]]:
    """At the end all threads of groups must be gone but those of before, which tensor parallel tests may have left to
    the garbage collector. Whether it is so can be asked at any time."""
    before = group_threads()

    def none_left() -> bool:
        return group_threads() <= before

    yield none_left
    await until(none_left)


def num_sockets() -> int:
    num = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            num += os.readlink(path).startswith("socket:")
    return num


async def until(holds: Callable[[], object], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110  What is waited for is on other threads.
            await asyncio.sleep(0.005)


def on_stage(script: Callable[[Stage], Awaitable[Any]]) -> None:
    """Run `script`; afterwards no thread and no group may be left."""

    async def main() -> None:
        async with no_thread_left():
            stage = Stage()
            await stage.start()
            try:
                await script(stage)
            finally:
                await stage.stop()
            await until(lambda: not stage.pairs)

    asyncio.run(main())
