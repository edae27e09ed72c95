"""KV by torch.distributed: NCCL between GPUs, Gloo between CPUs, on a group of one sender and one receiver.

The group lives as long as a gRPC call, Join, whose end tells either side of the other's death. Each frame is announced
by a small call, Put, which is answered when the frame was received into staging, verified and written.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import grpc
import grpc.aio
import torch
import xxhash

from workers.errors import FrameError, StaleGrantError, UnavailableError
from workers.kv_transfer.base import KVReceiver, Refusal
from workers.kv_transfer.pair_group import RECEIVER, SENDER, Backend, PairGroup
from workers.kv_transfer.sessions import Pair, SessionSender
from workers.rpc import Network, add_bytes_method, add_bytes_stream, call

_SERVICE, _JOIN, _PUT = "kvferry.v1.KVGroups", "Join", "Put"
# For the two sides to meet, at most. A send that waits for it may give up sooner.
_JOIN_TIMEOUT_S = 5.0
# Of one frame, behind its pair: place in the group's sequence, bytes, seconds that the sender gives it.
_ANNOUNCEMENT, _CHECKSUM = struct.Struct("<QQd"), struct.Struct("<Q")


class GroupSession:
    """One group, at its sender."""

    def __init__(self, pair: Pair, group: PairGroup, joined: Any, put: Any) -> None:
        self.group = group
        self._pair = pair
        self._joined = joined
        self._put = put
        self._sequence = itertools.count()

    @property
    def ended(self) -> bool:
        return self.group.lane.ended.is_set()

    async def put(self, packed: bytearray, timeout_s: float) -> None:
        announcement = self._pair.pack() + _announcement(next(self._sequence), len(packed), timeout_s)
        sent = asyncio.ensure_future(self.group.send(packed, timeout_s))
        answered = asyncio.ensure_future(call(self._put(announcement, timeout=timeout_s)))
        try:
            refused = await self._refused(sent, answered)
        except BaseException:
            answered.cancel()
            self.end()
            raise
        if refused:
            raise refused

    async def _refused(self, sent: Awaitable[None], answered: Awaitable[None]) -> FrameError | StaleGrantError | None:
        """Why the frame was refused, if it was: it has come all the same, and the next one finds the group in order."""
        try:
            await asyncio.gather(sent, answered)
        except (FrameError, StaleGrantError) as error:
            await sent
            return error
        return None

    def end(self) -> None:
        self.group.lane.end()
        self._joined.cancel()


class Incoming:
    """One group, at its receiver. Announcements come in any order, and are received in that of the sequence."""

    def __init__(self, group: PairGroup) -> None:
        self.group = group
        self._turns: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._waiting: set[int] = set()
        self._num_taken = 0

    def begin(self) -> None:
        self._turns[0].set()

    async def receive(self, sequence: int, num_bytes: int, timeout_s: float) -> torch.Tensor:
        """Staging that begins with the frame's bytes."""
        if sequence < self._num_taken or sequence in self._waiting:
            raise UnavailableError(f"frame {sequence} of its group was announced before")
        self._waiting.add(sequence)
        try:
            await self._turns[sequence].wait()
            del self._turns[sequence]
            self._waiting.remove(sequence)
            self._num_taken += 1
            self._turns[sequence + 1].set()
            staging = self.group.take(num_bytes)
            await self.group.receive(staging, num_bytes, timeout_s)
            return staging
        except BaseException:
            self.group.lane.end()  # Its turn is never taken again.
            raise


class NcclTransport:
    frame_scale = 1

    def __init__(self, backend: Backend, network: Network, incarnation: str) -> None:
        self.name = backend.name
        self._backend = backend
        self._network = network
        self._incarnation = incarnation
        self._numbers = itertools.count()
        self._incoming: dict[Pair, Incoming] = {}

    def sender(self, address: str, incarnation: str) -> SessionSender:
        async def meet(channel: grpc.aio.Channel) -> GroupSession:
            pair = Pair(self._incarnation, incarnation, next(self._numbers))
            return await self._meet(pair, channel, address.rsplit(":", 1)[0].strip("[]"))

        return SessionSender(self._network, address, meet)

    def serve(self, receiver: KVReceiver, server: grpc.aio.Server) -> None:
        async def put(announcement: bytes) -> None:
            await self._receive(announcement, receiver)

        add_bytes_stream(server, _SERVICE, _JOIN, self._join)
        add_bytes_method(server, _SERVICE, _PUT, put)

    def reachable(self, receiver: KVReceiver, address: str) -> None:
        pass

    def offer(self) -> bytes:
        return self._backend.identity()

    def refusal(self, offer: bytes) -> Refusal | None:
        # CPUs have no identity.
        if offer and offer == self._backend.identity():
            return Refusal("both are on one GPU, which NCCL takes once")
        return None

    async def _meet(self, pair: Pair, channel: grpc.aio.Channel, peer_host: str) -> GroupSession:
        group, joined = PairGroup(self._backend, SENDER, str(pair)), None
        join: Any = channel.unary_stream(f"/{_SERVICE}/{_JOIN}")
        try:
            host = await group.local_host(peer_host)
            joined = join(pair.pack() + host.encode())
            joined.add_done_callback(lambda _: group.lane.end())
            store = await call(joined.read())
            await group.find_store(store.decode(), _JOIN_TIMEOUT_S)
            await group.connect(host, _JOIN_TIMEOUT_S)
        except BaseException:
            group.lane.end()
            if joined is not None:
                joined.cancel()
            raise
        return GroupSession(pair, group, joined, channel.unary_unary(f"/{_SERVICE}/{_PUT}"))

    async def _join(self, data: bytes) -> AsyncGenerator[bytes, None]:
        """Hold one end of a group for as long as the call lasts."""
        pair, sender_host = Pair.unpack(data)
        if pair.receiver != self._incarnation:
            raise UnavailableError(f"incarnation {pair.receiver} is no more; this is {self._incarnation}")
        group = PairGroup(self._backend, RECEIVER, str(pair))
        incoming = self._incoming[pair] = Incoming(group)
        try:
            host = await group.local_host(sender_host.decode())
            yield (await group.host_store(host, _JOIN_TIMEOUT_S)).encode()
            await group.connect(host, _JOIN_TIMEOUT_S)
            incoming.begin()
            await group.lane.ended.wait()
        finally:
            group.lane.end()
            del self._incoming[pair]

    async def _receive(self, announcement: bytes, receiver: KVReceiver) -> None:
        pair, fields = Pair.unpack(announcement)
        incoming = self._incoming.get(pair)
        if incoming is None:
            raise UnavailableError(f"there is no group {pair}")
        sequence, num_bytes, timeout_s = _read_announcement(fields)
        staging = await incoming.receive(sequence, num_bytes, timeout_s)
        try:
            await receiver.receive(staging.numpy().data[:num_bytes])
        except (FrameError, StaleGrantError):
            incoming.group.give_back(staging)
            raise
        # Not after a cancellation: a write may go on reading it.
        incoming.group.give_back(staging)


def _announcement(sequence: int, num_bytes: int, timeout_s: float) -> bytes:
    fields = _ANNOUNCEMENT.pack(sequence, num_bytes, timeout_s)
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def _read_announcement(data: bytes) -> tuple[int, int, float]:
    """Raises UnavailableError when it is damaged: its frame can't be received then, and a wrong size would end this
    process (PairGroup)."""
    fields, checksum = data[: _ANNOUNCEMENT.size], data[_ANNOUNCEMENT.size :]
    if checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields)):
        raise UnavailableError("the announcement of a frame is damaged")
    sequence, num_bytes, timeout_s = _ANNOUNCEMENT.unpack(fields)
    return sequence, num_bytes, timeout_s
