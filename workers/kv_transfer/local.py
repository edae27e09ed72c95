"""KV inside one process: the receiver is called directly, with the same encoded frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from workers.errors import DeadlineError, UnavailableError
from workers.kv_transfer.base import KVReceiver
from workers.kv_transfer.frame import UnsentFrame


class LocalSender:
    def __init__(self, find: Callable[[], KVReceiver | None], address: str) -> None:
        self._find = find
        self._address = address

    def pack(self, frame: UnsentFrame) -> bytearray:
        data = bytearray(frame.encoded_bytes)
        frame.encode_into(memoryview(data))
        return data

    async def send(self, packed: bytearray, timeout_s: float) -> None:
        receiver = self._find()
        if receiver is None:
            raise UnavailableError(f"no worker at {self._address} in this process")
        try:
            async with asyncio.timeout(timeout_s):
                await receiver.receive(packed)
        except TimeoutError:
            raise DeadlineError(f"{self._address} took no frame within {timeout_s} s") from None

    async def close(self) -> None:
        pass


class LocalTransport:
    """Shared by all workers of the process, which are found by address."""

    name = "local"
    frame_scale = 1

    def __init__(self) -> None:
        self.receivers: dict[str, KVReceiver] = {}

    def sender(self, address: str, incarnation: str) -> LocalSender:
        return LocalSender(lambda: self.receivers.get(address), address)

    def serve(self, receiver: KVReceiver, server: grpc.aio.Server) -> None:
        pass

    def reachable(self, receiver: KVReceiver, address: str) -> None:
        self.receivers[address] = receiver

    def offer(self) -> bytes:
        return b""

    def refusal(self, offer: bytes) -> None:
        return None
