"""gRPC without sockets: what Stubs and Servicers need of it, on the event loop, with seeded latency and faults.

Every message crosses as its serialised bytes. A call's messages keep their order; different calls overtake each other.
tests/sim/test_network.py holds it against grpc.aio.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from cluster.sim.loop import PROCESS, virtual_loop
from cluster.sim.rpc import ClientCall, ServerCall, Status, StreamCall, UnaryCall
from workers import rpc
from workers.errors import ConfigError
from workers.rpc import BytesCaller

C = TypeVar("C", bound=ClientCall)
T = TypeVar("T")
S = TypeVar("S")
# Seconds a message of so many bytes takes.
Latency = Callable[[random.Random, int], float]
# What becomes of a message: its copies, each with the seconds that it is late. None: it is lost.
Fault = Callable[[bytes], Sequence[tuple[float, bytes]]]


def fast_lan(rng: random.Random, num_bytes: int) -> float:
    """0.1 to 0.5 ms, and 10 Gbit/s."""
    return rng.uniform(1e-4, 5e-4) + num_bytes / 1.25e9


def drop(data: bytes) -> Sequence[tuple[float, bytes]]:
    return ()


def duplicate(data: bytes) -> Sequence[tuple[float, bytes]]:
    return ((0.0, data), (0.0, data))


def delay(seconds: float) -> Fault:
    return lambda data: ((seconds, data),)


def truncate(num_bytes: int) -> Fault:
    """Let only so many bytes of it arrive."""
    return lambda data: ((0.0, data[:num_bytes]),)


def corrupt(at: int, mask: int = 1) -> Fault:
    """Flip bits of the byte at `at`, which may count from the end."""

    def flip(data: bytes) -> Sequence[tuple[float, bytes]]:
        changed = bytearray(data)
        changed[at] ^= mask
        return ((0.0, bytes(changed)),)

    return flip


@dataclass(eq=False)
class Hook:
    """A fault at requests or answers of one method, everywhere or at one address."""

    network: SimNetwork
    method: str
    fault: Fault
    answers: bool
    to: str
    skip: int
    count: int
    num_seen: int = 0

    def applies(self, method: str, address: str, answers: bool) -> bool:
        if answers is not self.answers or method.rsplit("/", 1)[-1] != self.method or self.to not in ("", address):
            return False
        self.num_seen += 1
        return self.skip < self.num_seen <= self.skip + self.count

    def remove(self) -> None:
        self.network.hooks.remove(self)


class SimNetwork:
    """All hosts and what lies between them. Its random numbers are its own: equal seeds, equal latencies."""

    def __init__(self, seed: int = 0, latency: Latency = fast_lan) -> None:
        self.listening: dict[str, SimServer] = {}
        self.hooks: list[Hook] = []
        # A message under way is nobody's: its sender may be paused.
        self.context = contextvars.copy_context()
        self._rng = random.Random(seed)
        self._latency = latency
        self._next_port = 1024

    def host(self) -> Host:
        return Host(self)

    def kill(self, address: str) -> None:
        """The host that listens at `address` dies, with all that it served and asked for."""
        self.listening[address].host.kill()

    def fault(
        self, method: str, fault: Fault, *, answers: bool = False, to: str = "", skip: int = 0, count: int = 1 << 62
    ) -> Hook:
        """From now on let `fault` decide over the messages of `method`, by its short name, until Hook.remove.

        The requests, or the answers, of calls to anybody or to one address, the first `skip` of them left alone.
        """
        hook = Hook(self, method, fault, answers, to, skip, count)
        self.hooks.append(hook)
        return hook

    def fate(self, method: str, address: str, answers: bool, data: bytes) -> Sequence[tuple[float, bytes]]:
        """The copies of a message that arrive, each after so many seconds."""
        hook = next((h for h in self.hooks if h.applies(method, address, answers)), None)
        copies = hook.fault(data) if hook else ((0.0, data),)
        return [(late_s + self.latency(len(copy)), copy) for late_s, copy in copies]

    def latency(self, num_bytes: int = 0) -> float:
        return self._latency(self._rng, num_bytes)

    def address(self, host: str, port: int) -> str:
        while not port:
            self._next_port += 1
            port = 0 if f"{host}:{self._next_port}" in self.listening else self._next_port
        return f"{host}:{port}"


class Host:
    """One process on the network: implements workers.rpc.Network, and can die or stand still."""

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.alive = True
        # What runs in it can be paused.
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        # Dicts for sets, here and below: in order, so that equal seeds give equal runs.
        self.calls: dict[ClientCall, None] = {}
        self.servers: list[SimServer] = []

    def connect(self, address: str, *, bulk: bool = False, multiplexed: bool = False) -> grpc.aio.Channel:
        """Each call by itself: what a fault hits is one."""
        return cast(grpc.aio.Channel, SimChannel(self, address))

    def server(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        max_message_bytes: int = -1,
        *,
        for_clients: bool = False,
    ) -> grpc.aio.Server:
        assert not interceptors, "calls of the simulated network have no metadata"
        return cast(grpc.aio.Server, SimServer(self))

    def add_multiplexed(self, server: grpc.aio.Server, add: Callable[[S, grpc.aio.Server], None], servicer: S) -> None:
        add(servicer, server)

    def bytes_caller(self, channel: grpc.aio.Channel, service: str, method: str) -> BytesCaller:
        """Each call by itself: what a fault hits is one frame."""
        put: Any = channel.unary_unary(f"/{service}/{method}")

        async def calling(data: bytes, timeout_s: float) -> None:
            await rpc.call(put(data, timeout=timeout_s))

        return calling

    def answer_bytes(
        self, server: grpc.aio.Server, service: str, method: str, handle: Callable[[bytes], Awaitable[None]]
    ) -> None:
        rpc.add_bytes_method(server, service, method, handle)

    async def listen(self, server: grpc.aio.Server, host: str, port: int) -> str:
        assert isinstance(server, SimServer)
        address = self.network.address(host, port)
        if address in self.network.listening:
            raise ConfigError(f"cannot listen on {address}: the port is in use; choose another")
        server.listen(address)
        return address

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Let it, and all tasks that it begins, be this process's."""
        return await asyncio.get_running_loop().create_task(work, context=self.context)

    def pause(self) -> None:
        """As kill -STOP: it neither answers nor dies, and its clock's alarms wait, until `resume`."""
        virtual_loop().freeze(self)

    def resume(self) -> None:
        virtual_loop().thaw(self)

    def kill(self) -> None:
        """What it served breaks, what it asked for is cancelled at the other side, and nothing gets in or out again."""
        self.alive = False
        for server in self.servers:
            server.break_calls(Status(grpc.StatusCode.UNAVAILABLE, "the connection was lost"))
        for call in list(self.calls):
            call.abandon(Status(grpc.StatusCode.UNAVAILABLE, "this host is dead"))
        self.resume()


class SimServer:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.calls: dict[ServerCall, None] = {}
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._address = ""

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """The generic handlers, which generated code adds too, answer the same methods."""

    def listen(self, address: str) -> None:
        self._address = address
        self.host.network.listening[address] = self
        self.host.servers.append(self)

    def handler(self, method: str) -> grpc.RpcMethodHandler[Any, Any] | None:
        details = cast(grpc.HandlerCallDetails, _CallDetails(method))
        return next((found for h in self._handlers if (found := h.service(details))), None)

    async def stop(self, grace: float | None) -> None:
        tasks = [call.task for call in self.calls]
        self.break_calls(Status(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls"))
        await asyncio.gather(*tasks, return_exceptions=True)

    def break_calls(self, status: Status) -> None:
        if self.host.network.listening.get(self._address) is self:
            del self.host.network.listening[self._address]
        for call in list(self.calls):
            call.break_off(status)


class SimChannel:
    def __init__(self, host: Host, address: str) -> None:
        self.host = host
        self.address = address
        self._calls: dict[ClientCall, None] = {}
        self._closed = False

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = False,
    ) -> Callable[..., UnaryCall]:
        def call(message: Any, *, timeout: float | None = None, metadata: tuple[()] = ()) -> UnaryCall:
            return self._begin(UnaryCall(self, method, response_deserializer), message, request_serializer, timeout)

        return call

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = False,
    ) -> Callable[..., StreamCall]:
        def call(message: Any, *, timeout: float | None = None, metadata: tuple[()] = ()) -> StreamCall:
            return self._begin(StreamCall(self, method, response_deserializer), message, request_serializer, timeout)

        return call

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        for call in list(self._calls):
            call.cancel()

    def forget(self, call: ClientCall) -> None:
        self._calls.pop(call, None)
        self.host.calls.pop(call, None)

    def _begin(self, call: C, message: Any, serialise: Callable[[Any], bytes] | None, timeout: float | None) -> C:
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        self._calls[call] = self.host.calls[call] = None
        call.begin(serialise(message) if serialise else message, timeout)
        return call


@dataclass(frozen=True)
class _CallDetails:
    method: str
    invocation_metadata: tuple[()] = ()
