"""Every way for KV to travel keeps KVSender's contract."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import SimNetwork
from workers.errors import DeadlineError, FrameError, StaleGrantError, UnavailableError
from workers.kv_transfer.base import KVSender, Transport
from workers.kv_transfer.frame import Buffer, Frame, decode, verify
from workers.kv_transfer.grpc import GrpcTransport
from workers.kv_transfer.local import LocalTransport
from workers.kv_transfer.shm import ShmTransport

every_transport = pytest.mark.parametrize("transport", ["grpc", "local", "shm"])
FRAME = Frame(7, "a" * 32, 0, 2, 0, 4, bytes(range(256)))


class Receiver:
    """Does what the request id says, and notes when it is done."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    async def receive(self, data: Buffer) -> None:
        frame, checksum = decode(data)
        if frame.grant_id == 99:
            raise StaleGrantError("no more")
        verify(frame, checksum, "r")
        await asyncio.sleep(1.0)
        self.received.append(bytes(frame.payload))


def on_stage(transport: str, script: Callable[[KVSender, Receiver], Awaitable[Any]]) -> None:
    async def main() -> None:
        host, receiver = SimNetwork().host(), Receiver()
        ways: dict[str, Transport] = {
            "grpc": GrpcTransport(host),
            "local": LocalTransport(),
            "shm": ShmTransport(host),
        }
        way = ways[transport]
        assert way.name == transport
        assert way.accepts(way.offer())
        server = host.server()
        way.serve(receiver, server)
        address = await host.listen(server, "h", 0)
        way.reachable(receiver, address)
        sender = way.sender(address, "a" * 32)
        await script(sender, receiver)
        await sender.close()
        nowhere = way.sender("h:1", "a" * 32)
        with pytest.raises(UnavailableError):
            await nowhere.send(FRAME, "r", 5.0)
        await nowhere.close()
        await server.stop(None)

    run(main())


@every_transport
def test_sending_returns_once_the_frame_is_in_place_and_several_go_at_once(transport):
    async def script(sender: KVSender, receiver: Receiver) -> None:
        await sender.send(FRAME, "r", 5.0)
        assert receiver.received == [FRAME.payload]
        began = virtual_loop().time()
        await asyncio.gather(*(sender.send(FRAME, "r", 5.0) for _ in range(4)))
        assert virtual_loop().time() - began < 1.1

    on_stage(transport, script)


@every_transport
def test_errors_keep_their_type(transport):
    async def script(sender: KVSender, receiver: Receiver) -> None:
        with pytest.raises(FrameError, match="checksum"):
            await sender.send(FRAME, "another request", 5.0)
        with pytest.raises(StaleGrantError, match="no more"):
            await sender.send(Frame(99, "a" * 32, 0, 2, 0, 4, FRAME.payload), "r", 5.0)
        assert receiver.received == []

    on_stage(transport, script)


@every_transport
def test_a_send_ends_at_its_deadline(transport):
    async def script(sender: KVSender, receiver: Receiver) -> None:
        with pytest.raises(DeadlineError):
            await sender.send(FRAME, "r", 0.5)
        assert virtual_loop().time() == pytest.approx(0.5, abs=0.01)

    on_stage(transport, script)
