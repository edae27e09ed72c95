"""KV by memory that both processes of one host map: only where it lies crosses the network, a small message a frame.

The receiver copies the KV out of the sender's pool into its own, and verifies what it copied: one copy in all, and none
by the sender. Where the pool is not in such memory, or its KV has to be cast, the sender copies it to a segment first.

Nobody writes there in between. The blocks of a hand-off are its own until the last answer; a segment is used again once
the receiver has answered, and never where no answer came. Should a sender give up on a receiver that still reads, what
comes of it is a hand-off that nobody commits.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import grpc.aio

from workers.errors import ConfigError, FrameError, StaleGrantError
from workers.kv_transfer.base import KVReceiver, Refusal
from workers.kv_transfer.frame import HEADER_BYTES, UnsentFrame
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.segment import Mappings, Segment, when_ended
from workers.rpc import Network

_SERVICE, _METHOD = "kvferry.v1.KVFrames", "PutShared"
_HOST_BYTES = 16


class ShmSender:
    def __init__(self, network: Network, address: str) -> None:
        self._channel = network.connect(address, bulk=True)
        self._put = network.bytes_caller(self._channel, _SERVICE, _METHOD)
        # As many as frames were ever under way at once.
        self._idle: list[Segment] = []

    def pack(self, frame: UnsentFrame) -> tuple[Segment | None, bytes]:
        """The segment that it was copied to, if it was; the message that tells where it lies."""
        segment, rows = None, frame.locate()
        if rows is None or not rows.place:
            segment = self._take(frame.num_bytes)
            payload = segment.memory[: frame.num_bytes]
            frame.fill(payload)
            rows = frame.frame.rows(payload, segment.place)
        return segment, frame.header(rows) + rows.encode()

    async def send(self, packed: tuple[Segment | None, bytes], timeout_s: float) -> None:
        segment, message = packed
        try:
            await self._put(message, timeout_s)
        except (FrameError, StaleGrantError):
            # The receiver has answered: it reads no more.
            self._put_back(segment)
            raise
        except BaseException:
            # It may still be reading: nobody writes there again.
            if segment is not None:
                segment.close()
            raise
        self._put_back(segment)

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

    def _put_back(self, segment: Segment | None) -> None:
        if segment is not None:
            self._idle.append(segment)


class ShmTransport:
    name = "shm"
    # No payload crosses the network: a call costs as much whatever is told by it.
    frame_scale = 8

    def __init__(self, network: Network) -> None:
        """Raises ConfigError where processes cannot share memory so."""
        self._network = network
        self._host = _this_host()
        # The memory of one that died is not kept for it.
        self._mappings = Mappings(lambda pid: when_ended(pid, lambda: self._mappings.forget(pid)))
        try:
            self._probe = Segment(1)
            Mappings().memory(self._probe.place)
        except (AttributeError, OSError, FrameError) as error:
            raise ConfigError(
                f"transport shm needs memfd and /proc, which do not work here ({error}); set transfer.transport: grpc",
                param="transfer.transport",
            ) from error

    def sender(self, address: str, incarnation: str) -> ShmSender:
        return ShmSender(self._network, address)

    def serve(self, receiver: KVReceiver, server: grpc.aio.Server) -> None:
        async def put(message: bytes) -> None:
            rows = KVRows.decode(message[HEADER_BYTES:], self._mappings)
            await receiver.receive(message[:HEADER_BYTES], rows)

        self._network.answer_bytes(server, _SERVICE, _METHOD, put)

    def reachable(self, receiver: KVReceiver, address: str) -> None:
        pass

    def offer(self) -> bytes:
        return self._host + self._probe.place

    def refusal(self, offer: bytes) -> Refusal | None:
        host, place = offer[:_HOST_BYTES], offer[_HOST_BYTES:]
        try:
            Mappings().memory(place)
        except FrameError as error:
            if host != self._host:
                return Refusal("it is on another host")
            mend = "two containers share memory if they have one pid namespace and one user"
            return Refusal(f"it is on the same host, but {error.message}; {mend}", is_fault=True)
        return None


def _this_host() -> bytes:
    """The same in all containers of a host; zeros where the kernel does not tell."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(_HOST_BYTES)
