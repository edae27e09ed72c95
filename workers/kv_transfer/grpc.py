"""KV over gRPC: one unary call a frame, raw bytes on a generic handler, so that no payload passes through protobuf."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from workers.kv_transfer.base import KVReceiver
from workers.kv_transfer.frame import UnsentFrame
from workers.rpc import Network, add_bytes_method, call

_SERVICE, _METHOD = "kvferry.v1.KVFrames", "Put"


class GrpcSender:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._put: Any = channel.unary_unary(f"/{_SERVICE}/{_METHOD}")
        # Used again and again: pages that are new each time cost more than the copy from here.
        self._room = bytearray()

    def pack(self, frame: UnsentFrame) -> bytes:
        num_bytes = frame.encoded_bytes
        if len(self._room) < num_bytes:
            self._room = bytearray(num_bytes)
        with memoryview(self._room)[:num_bytes] as room:
            frame.encode_into(room)
            # grpc takes nothing but bytes, which cannot be filled in place.
            return bytes(room)

    async def send(self, packed: bytes, timeout_s: float) -> None:
        await call(self._put(packed, timeout=timeout_s))

    async def close(self) -> None:
        await self._channel.close()


class GrpcTransport:
    name = "grpc"

    def __init__(self, network: Network) -> None:
        self._network = network

    def sender(self, address: str, incarnation: str) -> GrpcSender:
        return GrpcSender(self._network.connect(address, bulk=True))

    def serve(self, receiver: KVReceiver, server: grpc.aio.Server) -> None:
        async def put(data: bytes) -> None:
            await receiver.receive(data)

        add_bytes_method(server, _SERVICE, _METHOD, put)

    def reachable(self, receiver: KVReceiver, address: str) -> None:
        pass

    def offer(self) -> bytes:
        return b""

    def accepts(self, offer: bytes) -> bool:
        return True
