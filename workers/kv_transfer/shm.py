"""KV through shared memory on one host: a copy out of the sender's pool into memory that the receiver maps, another
out of there into the receiver's pool.

The receiver verifies the frame where it lies. Nobody writes there in between: the sender uses the memory again once the
receiver has answered, and never where no answer came.

The memory is a memfd: it has no name that could leak, and goes with the last process that maps it. The receiver opens
it by way of /proc/<pid>/fd, which works for processes of one user that see each other's ids; `accepts` tries just that.
Only where a frame lies crosses the network, as one small gRPC call a frame.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import weakref
from collections import OrderedDict
from typing import Any

import grpc
import grpc.aio

from workers.errors import ConfigError, FrameError, StaleGrantError
from workers.kv_transfer.base import KVReceiver
from workers.kv_transfer.frame import UnsentFrame
from workers.rpc import Network, add_bytes_method, call

_SERVICE, _METHOD = "kvferry.v1.KVFrames", "PutShared"
# pid, file descriptor, the segment's token, bytes of the frame
_PLACE = struct.Struct("<II16sQ")
_TOKEN_BYTES = 16
# Mappings that a receiver keeps; one more costs the unmapping of the least recently used.
_MAX_MAPPINGS = 64


class Segment:
    """Memory for one frame at a time: a token that no other segment has, then the frame."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._fd = os.memfd_create("kvferry", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _TOKEN_BYTES + num_bytes)
        self._memory = mmap.mmap(self._fd, _TOKEN_BYTES + num_bytes)
        self._memory[:_TOKEN_BYTES] = self._token
        # Also of one that was packed and never sent, since its hand-off had ended.
        self._close_fd = weakref.finalize(self, os.close, self._fd)

    def write(self, frame: UnsentFrame) -> bytes:
        """The place of the encoded frame."""
        num_bytes = frame.encoded_bytes
        with memoryview(self._memory) as whole, whole[_TOKEN_BYTES : _TOKEN_BYTES + num_bytes] as room:
            frame.encode_into(room)
        return self.place(num_bytes)

    def place(self, num_bytes: int = 0) -> bytes:
        return _PLACE.pack(os.getpid(), self._fd, self._token, num_bytes)

    def close(self) -> None:
        """Whoever has it mapped keeps what is in it."""
        self._memory.close()
        self._close_fd()


class Mappings:
    """Segments of other processes, mapped to be read."""

    def __init__(self) -> None:
        # By token, with the process that it is of.
        self._mapped: OrderedDict[bytes, tuple[int, memoryview]] = OrderedDict()

    def view(self, place: bytes) -> memoryview:
        """The frame at `place`. Raises FrameError when this process cannot see it."""
        pid, fd, token, num_bytes = _PLACE.unpack(place)
        if token not in self._mapped:
            self._forget_the_dead()
            self._mapped[token] = pid, _map(pid, fd, token)
        self._mapped.move_to_end(token)
        if len(self._mapped) > _MAX_MAPPINGS:
            # Unmapped once the last view into it is gone.
            self._mapped.popitem(last=False)
        return self._mapped[token][1][_TOKEN_BYTES : _TOKEN_BYTES + num_bytes]

    def _forget_the_dead(self) -> None:
        """Memory goes with the last process that has it mapped."""
        for token, (pid, _) in list(self._mapped.items()):
            if not os.path.exists(f"/proc/{pid}"):
                del self._mapped[token]


def _map(pid: int, fd: int, token: bytes) -> memoryview:
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            whole = memoryview(mmap.mmap(own, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(own)
    except (OSError, ValueError) as error:
        raise FrameError(f"the shared memory of process {pid} cannot be read here: {error}") from error
    if whole[:_TOKEN_BYTES] != token:
        raise FrameError(f"file descriptor {fd} of process {pid} is not the segment that was sent")
    return whole


class ShmSender:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._put: Any = channel.unary_unary(f"/{_SERVICE}/{_METHOD}")
        # As many as frames were ever under way at once.
        self._idle: list[Segment] = []

    def pack(self, frame: UnsentFrame) -> tuple[Segment, bytes]:
        segment = self._take(frame.encoded_bytes)
        return segment, segment.write(frame)

    async def send(self, packed: tuple[Segment, bytes], timeout_s: float) -> None:
        segment, place = packed
        try:
            await call(self._put(place, timeout=timeout_s))
        except (FrameError, StaleGrantError):
            # The receiver has answered: it reads no more.
            self._idle.append(segment)
            raise
        except BaseException:
            # It may still be reading: nobody writes there again.
            segment.close()
            raise
        self._idle.append(segment)

    async def close(self) -> None:
        for segment in self._idle:
            segment.close()
        self._idle.clear()
        await self._channel.close()

    def _take(self, num_bytes: int) -> Segment:
        try:
            segment = self._idle.pop()
        except IndexError:
            return Segment(num_bytes)
        if segment.num_bytes >= num_bytes:
            return segment
        segment.close()
        return Segment(num_bytes)


class ShmTransport:
    name = "shm"

    def __init__(self, network: Network) -> None:
        """Raises ConfigError where processes cannot share memory so."""
        self._network = network
        self._mappings = Mappings()
        try:
            self._probe = Segment(1)
            Mappings().view(self._probe.place())
        except (AttributeError, OSError, FrameError) as error:
            raise ConfigError(
                f"transport shm needs memfd and /proc, which do not work here ({error}); set transfer.transport: grpc",
                param="transfer.transport",
            ) from error

    def sender(self, address: str, incarnation: str) -> ShmSender:
        return ShmSender(self._network.connect(address, bulk=True))

    def serve(self, receiver: KVReceiver, server: grpc.aio.Server) -> None:
        async def put(place: bytes) -> None:
            await receiver.receive(self._mappings.view(place))

        add_bytes_method(server, _SERVICE, _METHOD, put)

    def reachable(self, receiver: KVReceiver, address: str) -> None:
        pass

    def offer(self) -> bytes:
        return self._probe.place()

    def accepts(self, offer: bytes) -> bool:
        try:
            Mappings().view(offer)
        except (FrameError, struct.error):
            return False
        return True
