"""The workers that this one sends KV to, each known by its incarnation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from protos import kv_transfer_pb2 as pb
from protos import kv_transfer_pb2_grpc as pb_grpc
from workers.config import TransferConfig
from workers.errors import StaleGrantError, UnavailableError
from workers.kv_transfer.base import Grant, Transport
from workers.kv_transfer.frame import UnsentFrame
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.transports import Transports
from workers.request import Request
from workers.rpc import Network, call
from workers.wire import request_to_pb

logger = logging.getLogger(__name__)


class Peer:
    """One incarnation of a worker: a small channel for words, a sender for frames, a window of credits."""

    def __init__(
        self,
        answer: pb.ConnectResponse,
        channel: grpc.aio.Channel,
        transport: Transport,
        address: str,
        timeout_s: float,
    ) -> None:
        self.incarnation = answer.incarnation
        self.address = address
        # What frames to it have: KV is cast here where its dtype is another.
        self.layout = KVLayout.from_proto(answer.layout)
        self.transport = transport.name
        self.frame_scale = transport.frame_scale
        self._sender = transport.sender(address, answer.incarnation)
        self.window = asyncio.Semaphore(answer.credits)
        self._channel = channel
        self._stub = pb_grpc.KVTransferServiceStub(channel)
        self._timeout_s = timeout_s

    def pack(self, frame: UnsentFrame) -> Any:
        """As KVSender.pack."""
        return self._sender.pack(frame)

    async def send(self, packed: Any) -> None:
        """As KVSender.send, whose errors it raises."""
        with _unless_closed():
            await self._sender.send(packed, self._timeout_s)

    async def commit(self, message: pb.CommitRequest) -> None:
        with _unless_closed():
            await call(self._stub.Commit(message, timeout=self._timeout_s))

    async def release(self, grant_id: int, reason: str) -> None:
        message = pb.ReleaseRequest(grant_id=grant_id, incarnation=self.incarnation, reason=reason)
        with _unless_closed():
            await call(self._stub.Release(message, timeout=self._timeout_s))

    async def reserve_replica(self, request: Request) -> Grant:
        """Ask for room for a copy. Of any incarnation: the grant tells which. Raises OverloadedError."""
        message = pb.ReserveReplicaRequest(request=request_to_pb(request))
        with _unless_closed():
            answer = await call(self._stub.ReserveReplica(message, timeout=self._timeout_s))
        return Grant.from_proto(answer.grant)

    async def renew(self, grant_ids: Iterable[int], timeout_s: float) -> list[int]:
        """The grants among `grant_ids` that are no more."""
        message = pb.RenewRequest(incarnation=self.incarnation, grant_ids=grant_ids)
        with _unless_closed():
            return list((await call(self._stub.Renew(message, timeout=timeout_s))).lost_grant_ids)

    async def close(self) -> None:
        await self._sender.close()
        await self._channel.close()


class Peers:
    """Connects to each peer once; forgets an incarnation the moment another answers at its address."""

    def __init__(
        self, network: Network, transports: Transports, layout: KVLayout, incarnation: str, config: TransferConfig
    ) -> None:
        self._network = network
        self._transports = transports
        self._layout = layout
        self._incarnation = incarnation
        self._config = config
        self._peers: dict[str, Peer] = {}
        self._connecting: dict[str, asyncio.Lock] = {}

    @property
    def connected(self) -> list[Peer]:
        return list(self._peers.values())

    async def get(self, grant: Grant) -> Peer:
        """The peer that gave `grant`. Raises StaleGrantError when another incarnation is there, LayoutMismatchError,
        UnavailableError or DeadlineError."""
        async with self._lock(grant.address):
            peer = self._peers.get(grant.address)
            if peer is None or peer.incarnation != grant.incarnation:
                found = await self._connect(grant.address)
                if peer is not None and found.incarnation == peer.incarnation:
                    await found.close()  # The grant is old, not the peer.
                else:
                    await self._drop(grant.address)
                    peer = self._peers[grant.address] = found
        if peer.incarnation != grant.incarnation:
            raise StaleGrantError(f"the worker at {grant.address} is not the one that gave grant {grant.grant_id}")
        return peer

    async def at(self, address: str) -> Peer:
        """The peer that was last known at `address`. Raises LayoutMismatchError, UnavailableError or DeadlineError."""
        async with self._lock(address):
            if address not in self._peers:
                self._peers[address] = await self._connect(address)
            return self._peers[address]

    async def close(self) -> None:
        for address in list(self._peers):
            await self._drop(address)

    def _lock(self, address: str) -> asyncio.Lock:
        return self._connecting.setdefault(address, asyncio.Lock())

    async def _connect(self, address: str) -> Peer:
        channel = self._network.connect(address)
        timeout_s = self._config.rpc_timeout_s
        message = pb.ConnectRequest(
            incarnation=self._incarnation,
            layout=self._layout.to_proto(),
            offers=self._transports.offers(),
            checksum=self._config.checksum,
        )
        try:
            answer = await call(pb_grpc.KVTransferServiceStub(channel).Connect(message, timeout=timeout_s))
            self._layout.require_convertible(KVLayout.from_proto(answer.layout))
            transport = self._transports.best(answer.transports, address)
        except BaseException:
            await channel.close()
            raise
        peer = Peer(answer, channel, transport, address, timeout_s)
        dtype = f"cast here from {self._layout.dtype} to" if peer.layout.dtype != self._layout.dtype else "in"
        logger.info(
            "KV to %s at %s goes by %s, %s %s", peer.incarnation, address, peer.transport, dtype, peer.layout.dtype
        )
        return peer

    async def _drop(self, address: str) -> None:
        if peer := self._peers.pop(address, None):
            await peer.close()


@contextmanager
def _unless_closed() -> Iterator[None]:
    """For who still has to do with a peer that was dropped."""
    try:
        yield
    except grpc.aio.UsageError:
        raise UnavailableError("the connection is closed: another incarnation is there now") from None
