"""The workers that this one sends KV to, each known by its incarnation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import grpc.aio

from protos import kv_transfer_pb2 as pb
from protos import kv_transfer_pb2_grpc as pb_grpc
from workers.config import TransferConfig
from workers.errors import DeadlineError, KVFerryError, StaleGrantError, UnavailableError
from workers.kv_transfer.base import Grant
from workers.kv_transfer.frame import UnsentFrame
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.transports import Transports, Way
from workers.request import Request
from workers.rpc import Network, call
from workers.wire import request_to_pb

logger = logging.getLogger(__name__)

# A peer that no call has reached for so long is closed when another is connected to.
_FORGET_S = 60.0


class Peer:
    """One incarnation of a worker: a small channel for words, a sender for frames, a window of credits."""

    def __init__(
        self,
        answer: pb.ConnectResponse,
        channel: grpc.aio.Channel,
        way: Way,
        address: str,
        timeout_s: float,
    ) -> None:
        self.incarnation = answer.incarnation
        self.address = address
        # What frames to it have: KV is cast here where its dtype is another.
        self.layout = KVLayout.from_proto(answer.layout)
        self.transport = way.transport.name
        self.why = way.why
        self.frame_scale = way.transport.frame_scale
        # Another incarnation is at its address now.
        self.was_dropped = False
        # On the event loop's clock, since when no call gets through; None: the last one did.
        self.lost_s: float | None = None
        self._sender = way.transport.sender(address, answer.incarnation)
        self.window = asyncio.Semaphore(answer.credits)
        self._channel = channel
        self._stub = pb_grpc.KVTransferServiceStub(channel)
        self._timeout_s = timeout_s

    def pack(self, frame: UnsentFrame) -> Any:
        """As KVSender.pack."""
        return self._sender.pack(frame)

    async def send(self, packed: Any) -> None:
        """As KVSender.send, whose errors it raises."""
        with _call_to(self):
            await self._sender.send(packed, self._timeout_s)

    async def commit(self, message: pb.CommitRequest) -> None:
        with _call_to(self):
            await call(self._stub.Commit(message, timeout=self._timeout_s))

    async def release(self, grant_id: int, reason: str) -> None:
        message = pb.ReleaseRequest(grant_id=grant_id, incarnation=self.incarnation, reason=reason)
        with _call_to(self):
            await call(self._stub.Release(message, timeout=self._timeout_s))

    async def reserve_replica(self, request: Request) -> Grant:
        """Ask for room for a copy. Of any incarnation: the grant tells which. Raises OverloadedError."""
        message = pb.ReserveReplicaRequest(request=request_to_pb(request))
        with _call_to(self):
            answer = await call(self._stub.ReserveReplica(message, timeout=self._timeout_s))
        return Grant.from_proto(answer.grant)

    async def renew(self, grant_ids: Iterable[int], timeout_s: float) -> list[int]:
        """The grants among `grant_ids` that are no more."""
        message = pb.RenewRequest(incarnation=self.incarnation, grant_ids=grant_ids)
        with _call_to(self):
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
        # Of those that are being connected to.
        self._connecting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> list[Peer]:
        """Those whose last call got through."""
        return [peer for peer in self._peers.values() if peer.lost_s is None]

    async def get(self, grant: Grant) -> Peer:
        """The peer that gave `grant`. Raises as `known`."""
        return await self.known(grant.address, grant.incarnation)

    async def known(self, address: str, incarnation: str) -> Peer:
        """The peer at `address`. Raises StaleGrantError when another incarnation is there, LayoutMismatchError,
        UnavailableError or DeadlineError."""
        async with self._lock(address):
            peer = self._peers.get(address)
            if peer is None or peer.incarnation != incarnation:
                found = await self._connect(address)
                if peer is not None and found.incarnation == peer.incarnation:
                    self._close(found)  # Who asks is late, not the peer.
                else:
                    self._drop(address)
                    peer = self._peers[address] = found
        if peer.incarnation != incarnation:
            raise StaleGrantError(f"the worker at {address} is no more incarnation {incarnation}")
        return peer

    async def at(self, address: str) -> Peer:
        """The peer that was last known at `address`. Raises LayoutMismatchError, UnavailableError or DeadlineError."""
        async with self._lock(address):
            if address not in self._peers:
                self._peers[address] = await self._connect(address)
            return self._peers[address]

    async def close(self) -> None:
        for address in list(self._peers):
            self._drop(address)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _lock(self, address: str) -> asyncio.Lock:
        return self._connecting.setdefault(address, asyncio.Lock())

    async def _connect(self, address: str) -> Peer:
        forgotten_s = asyncio.get_running_loop().time() - _FORGET_S
        for peer in list(self._peers.values()):
            if peer.address != address and peer.lost_s is not None and peer.lost_s < forgotten_s:
                self._drop(peer.address)
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
            way = self._transports.best(answer, address)
        except BaseException:
            await channel.close()
            raise
        peer = Peer(answer, channel, way, address, timeout_s)
        dtype = f"cast here from {self._layout.dtype} to" if peer.layout.dtype != self._layout.dtype else "in"
        logger.log(
            logging.WARNING if way.is_fault else logging.INFO, "KV to %s at %s goes by %s%s, %s %s",
            peer.incarnation, address, peer.transport, f" ({way.why})" if way.why else "", dtype, peer.layout.dtype,
        )  # fmt: skip
        return peer

    def _drop(self, address: str) -> None:
        if peer := self._peers.pop(address, None):
            self._close(peer)

    def _close(self, peer: Peer) -> None:
        """Whoever asks for another does not wait for it, nor cut it off."""
        peer.was_dropped = True
        closing = asyncio.create_task(peer.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


@contextmanager
def _call_to(peer: Peer) -> Iterator[None]:
    """UnavailableError for who still has to do with a peer that was dropped."""
    try:
        yield
    except grpc.aio.UsageError:
        raise UnavailableError("the connection is closed: another incarnation is there now") from None
    except UnavailableError:
        if peer.was_dropped:
            # Closed while it was called.
            raise UnavailableError("the connection was closed: another incarnation is there now") from None
        if peer.lost_s is None:
            peer.lost_s = asyncio.get_running_loop().time()
        raise
    except DeadlineError:
        raise
    except KVFerryError:
        peer.lost_s = None  # It answers.
        raise
    peer.lost_s = None
