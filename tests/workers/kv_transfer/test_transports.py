"""Every way for KV to travel keeps KVSender's contract."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import SimNetwork
from tests.workers.kv_transfer.unsent import unsent, verify, whole
from workers.errors import DeadlineError, FrameError, StaleGrantError, UnavailableError
from workers.kv_transfer.base import KVSender, Transport
from workers.kv_transfer.frame import Buffer, Frame, decode
from workers.kv_transfer.grpc import GrpcTransport
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.local import LocalTransport
from workers.kv_transfer.shm import ShmTransport

every_transport = pytest.mark.parametrize("transport", ["grpc", "local", "shm"])
FRAME = Frame(7, "a" * 32, 0, 2, 0, 4, bytes(range(256)))


class Receiver:
    """Does what the request id says, and notes when it is done."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    async def receive(self, data: Buffer, elsewhere: KVRows | None = None) -> None:
        frame, checksum = decode(whole(data, elsewhere))
        if frame.grant_id == 99:
            raise StaleGrantError("no more")
        verify(frame, checksum, "r")
        await asyncio.sleep(1.0)
        self.received.append(bytes(frame.payload))


async def put(sender: KVSender[Any], frame: Frame, request_id: str = "r", timeout_s: float = 5.0) -> None:
    await sender.send(sender.pack(unsent(frame, request_id)), timeout_s)


def on_stage(transport: str, script: Callable[[KVSender[Any], Receiver], Awaitable[Any]]) -> None:
    async def main() -> None:
        host, receiver = SimNetwork().host(), Receiver()
        ways: dict[str, Transport] = {
            "grpc": GrpcTransport(host),
            "local": LocalTransport(),
            "shm": ShmTransport(host),
        }
        way = ways[transport]
        assert way.name == transport
        assert way.refusal(way.offer()) is None
        server = host.server()
        way.serve(receiver, server)
        address = await host.listen(server, "h", 0)
        way.reachable(receiver, address)
        sender = way.sender(address, "a" * 32)
        await script(sender, receiver)
        await sender.close()
        nowhere = way.sender("h:1", "a" * 32)
        with pytest.raises(UnavailableError):
            await put(nowhere, FRAME)
        await nowhere.close()
        await server.stop(None)

    run(main())


@every_transport
def test_sending_returns_once_the_frame_is_in_place_and_several_go_at_once(transport):
    async def script(sender: KVSender[Any], receiver: Receiver) -> None:
        await put(sender, FRAME)
        assert receiver.received == [FRAME.payload]
        began = virtual_loop().time()
        await asyncio.gather(*(put(sender, FRAME) for _ in range(4)))
        assert virtual_loop().time() - began < 1.1

    on_stage(transport, script)


@every_transport
def test_errors_keep_their_type(transport):
    async def script(sender: KVSender[Any], receiver: Receiver) -> None:
        with pytest.raises(FrameError, match="checksum"):
            await put(sender, FRAME, "another request")
        with pytest.raises(StaleGrantError, match="no more"):
            await put(sender, Frame(99, "a" * 32, 0, 2, 0, 4, FRAME.payload))
        assert receiver.received == []

    on_stage(transport, script)


@every_transport
def test_a_send_ends_at_its_deadline(transport):
    async def script(sender: KVSender[Any], receiver: Receiver) -> None:
        with pytest.raises(DeadlineError):
            await put(sender, FRAME, timeout_s=0.5)
        assert virtual_loop().time() == pytest.approx(0.5, abs=0.01)

    on_stage(transport, script)
