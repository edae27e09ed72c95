"""A client's way to its routers: a channel to each, calls that go on elsewhere when one dies."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from cluster.client_tls import ClientTls, Tls
from cluster.routers import Metadata, Patience, Routers
from protos.router_pb2_grpc import JobServiceStub, RouterServiceStub

if TYPE_CHECKING:
    from protos.router_pb2_grpc import JobServiceAsyncStub, RouterServiceAsyncStub

T = TypeVar("T")

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.primary_user_agent", "kvferry"),
    # A machine that is gone says nothing, and a router that is started anew is there soon.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


@dataclass(frozen=True, slots=True)
class Stubs:
    channel: grpc.Channel
    router: RouterServiceStub
    jobs: JobServiceStub


class Calls:
    """Calls under way on several threads, to be cancelled together."""

    def __init__(self) -> None:
        self._calls: set[grpc.Call] = set()
        self._cancelled = False

    def add(self, call: grpc.Call) -> None:
        """One that comes too late is cancelled, too."""
        self._calls.add(call)
        if self._cancelled:
            call.cancel()

    def discard(self, call: grpc.Call) -> None:
        self._calls.discard(call)

    def cancel(self) -> None:
        self._cancelled = True
        for call in list(self._calls):
            call.cancel()


class Connection:
    def __init__(self, target: str, tls: Tls | None = None, api_key: str | None = None) -> None:
        self.routers = Routers(target, api_key)
        self._tls = ClientTls(tls)
        self._stubs = self._made()
        # What runs on those whose certificates are former ones goes on.
        self._former: list[Stubs] = []

    @property
    def stubs(self) -> list[Stubs]:
        """Of each router, made with the certificates as they are now."""
        if self._tls.refresh():
            self._former += self._stubs
            self._stubs = self._made()
        return self._stubs

    @property
    def metadata(self) -> Metadata:
        return self.routers.metadata

    def call(self, ask: Callable[[Stubs, float], T], timeout_s: float, rounds: int | None = None) -> T:
        """What `ask`, which is given a router's stubs and its time, returns. Raises KVFerryError."""
        patience = Patience(self.routers, uuid.uuid4().hex, rounds=rounds)
        with self.routers.in_use():
            while True:
                try:
                    answer = ask(self.stubs[patience.at], timeout_s)
                except grpc.RpcError as exc:
                    pause_s = patience.pause_s(exc)
                else:
                    patience.heard()
                    return answer
                time.sleep(pause_s)

    def close(self) -> None:
        """To close it again changes nothing."""
        self.routers.closed = True
        for stubs in (*self._stubs, *self._former):
            stubs.channel.close()

    def _made(self) -> list[Stubs]:
        credentials = self._tls.credentials
        return [self._of(address, credentials) for address in self.routers.addresses]

    @staticmethod
    def _of(address: str, credentials: grpc.ChannelCredentials | None) -> Stubs:
        if credentials is None:
            channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
        return Stubs(channel, RouterServiceStub(channel), JobServiceStub(channel))


@dataclass(frozen=True, slots=True)
class AsyncStubs:
    channel: grpc.aio.Channel
    router: RouterServiceAsyncStub
    jobs: JobServiceAsyncStub


class AsyncConnection:
    def __init__(
        self,
        target: str,
        tls: Tls | None = None,
        api_key: str | None = None,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        self.routers = Routers(target, api_key)
        self._tls = ClientTls(tls if channel is None else False)
        self._stubs = self._made() if channel is None else [self._of(channel)]
        self._former: list[AsyncStubs] = []

    @property
    def stubs(self) -> list[AsyncStubs]:
        """As Connection.stubs."""
        if self._tls.refresh():
            self._former += self._stubs
            self._stubs = self._made()
        return self._stubs

    @property
    def metadata(self) -> Metadata:
        return self.routers.metadata

    async def call(
        self, ask: Callable[[AsyncStubs, float], Awaitable[T]], timeout_s: float, rounds: int | None = None
    ) -> T:
        """As Connection.call."""
        patience = self.patience(rounds=rounds)
        with self.routers.in_use():
            while True:
                try:
                    answer = await ask(self.stubs[patience.at], timeout_s)
                except grpc.aio.AioRpcError as exc:
                    pause_s = patience.pause_s(exc)
                else:
                    patience.heard()
                    return answer
                await asyncio.sleep(pause_s)

    def patience(self, rounds: int | None = None) -> Patience:
        return Patience(self.routers, uuid.uuid4().hex, clock=asyncio.get_running_loop().time, rounds=rounds)

    async def close(self) -> None:
        """To close it again changes nothing."""
        self.routers.closed = True
        await asyncio.gather(*(stubs.channel.close() for stubs in (*self._stubs, *self._former)))

    def _made(self) -> list[AsyncStubs]:
        credentials = self._tls.credentials
        return [self._of(self._channel(address, credentials)) for address in self.routers.addresses]

    @staticmethod
    def _channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)

    @staticmethod
    def _of(channel: grpc.aio.Channel) -> AsyncStubs:
        return AsyncStubs(channel, RouterServiceStub(channel), JobServiceStub(channel))
