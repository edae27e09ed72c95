"""KV over gRPC: one unary call a frame, raw bytes on a generic handler, so that no payload passes through protobuf."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from workers.kv_transfer.base import KVReceiver
from workers.kv_transfer.frame import UnsentFrame
from workers.rpc import Network, add_bytes_method, call

_SERVICE, _METHOD = "kvferry.v1.KVFrames", "Put"


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = (ctypes.py_object,), ctypes.c_void_p
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.argtypes, _view_of.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


def _filled_bytes(num_bytes: int, fill: Callable[[memoryview], None]) -> bytes:
    """What `fill` writes. grpc takes nothing but bytes, and to copy the frame into them would be a second copy: so they
    are written to as C code may, while nobody else has them."""
    data: bytes = _new_bytes(None, num_bytes)
    with _view_of(_address_of(data), num_bytes, _WRITABLE) as room:
        fill(room)
    return data


class GrpcSender:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._put: Any = channel.unary_unary(f"/{_SERVICE}/{_METHOD}")

    def pack(self, frame: UnsentFrame) -> bytes:
        return _filled_bytes(frame.encoded_bytes, frame.encode_into)

    async def send(self, packed: bytes, timeout_s: float) -> None:
        await call(self._put(packed, timeout=timeout_s))

    async def close(self) -> None:
        await self._channel.close()


class GrpcTransport:
    name = "grpc"
    frame_scale = 1

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

    def refusal(self, offer: bytes) -> None:
        return None
