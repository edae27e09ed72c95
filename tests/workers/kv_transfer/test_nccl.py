"""Torch's point-to-point groups between two workers, over real sockets: Gloo here, which runs what NCCL would."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from workers.errors import StaleGrantError
from workers.kv_transfer.frame import Buffer, Frame, decode, verify
from workers.kv_transfer.nccl import NcclTransport
from workers.kv_transfer.pair_group import Gloo
from workers.rpc import GrpcNetwork

SENDER, RECEIVER, NEXT = "a" * 32, "b" * 32, "c" * 32


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


class Receiver:
    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def receive(self, data: Buffer) -> None:
        frame, checksum = decode(data)
        if frame.grant_id == 99:
            raise StaleGrantError("no more")
        verify(frame, checksum, "r")
        await self.hold.wait()
        self.received.append(bytes(frame.payload))


def frame(payload: bytes = b"some KV", grant_id: int = 7) -> Frame:
    return Frame(grant_id, RECEIVER, 0, 2, 0, 4, payload)


class Side:
    """A receiving worker's transport behind its server."""

    def __init__(self, incarnation: str = RECEIVER) -> None:
        self.network = GrpcNetwork()
        self.receiver = Receiver()
        self.transport = NcclTransport(Gloo(), self.network, incarnation)
        self.server = self.network.server()
        self.transport.serve(self.receiver, self.server)

    async def start(self, port: int = 0) -> str:
        self.address = await self.network.listen(self.server, "127.0.0.1", port)
        return self.address

    async def stop(self) -> None:
        await self.server.stop(None)


def on_stage(script: Callable[[Any, Side], Awaitable[Any]]) -> None:
    async def main() -> None:
        side = Side()
        address = await side.start()
        sender = NcclTransport(Gloo(), GrpcNetwork(), SENDER).sender(address, RECEIVER)
        try:
            await script(sender, side)
        finally:
            await sender.close()
            await side.stop()

    asyncio.run(main())


def test_frames_arrive():
    async def script(sender, side: Side) -> None:
        t = time.time()
        await sender.send(frame(), "r", 5.0)
        print(time.time() - t)
        assert side.receiver.received == [b"some KV"]
        n = 200
        t = time.time()
        payloads = [bytes([i % 256]) * (2 << 20) for i in range(4)]
        window = asyncio.Semaphore(4)

        async def one(i):
            async with window:
                await sender.send(frame(payloads[i % 4]), "r", 5.0)

        await asyncio.gather(*(one(i) for i in range(n)))
        dt = time.time() - t
        print("GB/s", n * (2 << 20) / dt / 1e9)

    before = num_threads(), num_open()
    on_stage(script)
    time.sleep(0.5)
    print(before, num_threads(), num_open())
