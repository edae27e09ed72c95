"""KV by NIXL (kvferry[nixl]): the sender says where in its memory a frame lies, and the receiver reads it there.

Both have an agent for the two of them alone. It lives as long as a gRPC call, Join, whose end tells either side of
the other's death. UCX finds the way: RDMA where there is some, else TCP.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np

from workers.errors import ConfigError, FrameError, StaleGrantError, UnavailableError
from workers.kv_transfer.base import KVReceiver
from workers.kv_transfer.lane import Lane
from workers.kv_transfer.sessions import Pair, SessionSender
from workers.rpc import Network, add_bytes_method, add_bytes_stream, call

_SERVICE, _JOIN, _PUT = "kvferry.v1.KVReads", "Join", "Put"
# Of one frame, behind its pair: address, bytes, seconds that the sender gives it. Then NIXL's words on that memory.
_PLACE = struct.Struct("<QQd")
# Between looks at a transfer under way.
_POLL_S = 0.0001


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Registered memory for one frame at a time."""

    memory: np.ndarray  # [bytes] of uint8
    # What a reader must know of it besides its address.
    metadata: bytes
    # NIXL's word for it.
    registered: Any

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


class Agent:
    """NIXL's end of one pair of workers, all on one lane."""

    def __init__(self, name: str) -> None:
        """Raises ImportError, or what NIXL raises, where it cannot work."""
        self._nixl: Any = _load()
        self.lane = Lane(f"nixl agent {name}", (*_errors(self._nixl), OSError), self._end)
        self._agent: Any = None
        self._name = name
        # As much as was in use at once; smaller ones make way for larger ones.
        self._idle: list[Room] = []
        # Registered memory must outlive its agent.
        self._rooms: set[Room] = set()

    async def open(self) -> None:
        def on_thread() -> None:
            self._agent = self._nixl.nixl_agent(self._name, self._nixl.nixl_agent_config(backends=["UCX"]))

        await self.lane.run(on_thread)

    async def take(self, num_bytes: int) -> Room:
        if self._idle and len(self._idle[-1].memory) >= num_bytes:
            return self._idle.pop()
        too_small, self._idle = self._idle, []
        return await self.lane.run(lambda: self._register(num_bytes, too_small))

    async def fill(self, packed: bytearray) -> Room:
        """Room that begins with `packed`, for the other agent to read."""
        room = await self.take(len(packed))

        def copy() -> None:
            room.memory[: len(packed)] = np.frombuffer(packed, np.uint8)

        await self.lane.run(copy)
        return room

    def give_back(self, room: Room) -> None:
        """Nobody reads or writes it any more."""
        self._idle.append(room)

    async def read(self, address: int, metadata: bytes, num_bytes: int, timeout_s: float) -> Room:
        """Room that begins with what lies at the other agent's `address`. Raises UnavailableError."""
        room = await self.take(num_bytes)
        await self.lane.run(lambda: self._read(room, address, metadata, num_bytes, timeout_s))
        return room

    def _register(self, num_bytes: int, instead_of: list[Room]) -> Room:
        for room in instead_of:
            self._agent.deregister_memory(room.registered)
            self._rooms.remove(room)
        memory = np.empty(num_bytes, np.uint8)
        registered = self._agent.register_memory([(memory.ctypes.data, num_bytes, 0, "")], "DRAM")
        metadata = self._agent.get_partial_agent_metadata(registered, inc_conn_info=True, backends=["UCX"])
        room = Room(memory, metadata, registered)
        self._rooms.add(room)
        return room

    def _read(self, room: Room, address: int, metadata: bytes, num_bytes: int, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        here = self._agent.get_xfer_descs([(room.address, num_bytes, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
        peer = self._agent.add_remote_agent(metadata)
        transfer = self._agent.initialize_xfer("READ", here, there, peer)
        try:
            state = self._agent.transfer(transfer)
            while state == "PROC" and not self.lane.ended.is_set() and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(transfer)
            if state != "DONE":
                raise OSError(f"a read of {num_bytes} bytes was given up in the state {state}")
        finally:
            self._agent.release_xfer_handle(transfer)
            del transfer  # It would keep the agent.

    def _end(self) -> None:
        self.lane.finally_run(self._let_go)

    def _let_go(self) -> None:
        # Without an agent nothing reads or writes its memory, which may go then.
        self._agent = None
        self._idle.clear()
        self._rooms.clear()


class AgentSession:
    """The sender's end of one pair."""

    def __init__(self, pair: Pair, agent: Agent, joined: Any, put: Any) -> None:
        self._pair = pair
        self._agent = agent
        self._joined = joined
        self._put = put

    @property
    def ended(self) -> bool:
        return self._agent.lane.ended.is_set()

    async def put(self, packed: bytearray, timeout_s: float) -> None:
        try:
            room = await self._agent.fill(packed)
            place = self._pair.pack() + _PLACE.pack(room.address, len(packed), timeout_s) + room.metadata
            await call(self._put(place, timeout=timeout_s))
        except (FrameError, StaleGrantError):
            self._agent.give_back(room)  # The receiver has answered: it reads no more.
            raise
        except BaseException:
            self.end()
            raise
        self._agent.give_back(room)

    def end(self) -> None:
        self._agent.lane.end()
        self._joined.cancel()


class NixlTransport:
    name = "nixl"
    frame_scale = 1

    def __init__(self, network: Network, incarnation: str) -> None:
        """Raises ConfigError without NIXL."""
        _require()
        self._network = network
        self._incarnation = incarnation
        self._numbers = itertools.count()
        self._reading: dict[Pair, Agent] = {}

    def sender(self, address: str, incarnation: str) -> SessionSender:
        async def meet(channel: grpc.aio.Channel) -> AgentSession:
            return await _meet(Pair(self._incarnation, incarnation, next(self._numbers)), channel)

        return SessionSender(self._network, address, meet)

    def serve(self, receiver: KVReceiver, server: grpc.aio.Server) -> None:
        async def put(place: bytes) -> None:
            await self._receive(place, receiver)

        add_bytes_stream(server, _SERVICE, _JOIN, self._join)
        add_bytes_method(server, _SERVICE, _PUT, put)

    def reachable(self, receiver: KVReceiver, address: str) -> None:
        pass

    def offer(self) -> bytes:
        return b""

    def refusal(self, offer: bytes) -> None:
        return None

    async def _join(self, data: bytes) -> AsyncGenerator[bytes, None]:
        """Hold the reading end of a pair for as long as the call lasts."""
        pair, _ = Pair.unpack(data)
        if pair.receiver != self._incarnation:
            raise UnavailableError(f"incarnation {pair.receiver} is no more; this is {self._incarnation}")
        agent = self._reading[pair] = Agent(f"{pair} receiver")
        try:
            await agent.open()
            yield b""
            await agent.lane.ended.wait()
        finally:
            agent.lane.end()
            del self._reading[pair]

    async def _receive(self, message: bytes, receiver: KVReceiver) -> None:
        pair, place = Pair.unpack(message)
        agent = self._reading.get(pair)
        if agent is None:
            raise UnavailableError(f"there is no nixl agent for {pair}")
        address, num_bytes, timeout_s = _PLACE.unpack_from(place)
        room = await agent.read(address, place[_PLACE.size :], num_bytes, timeout_s)
        try:
            await receiver.receive(room.memory.data[:num_bytes])
        except (FrameError, StaleGrantError):
            agent.give_back(room)
            raise
        # Not after a cancellation: a write may go on reading it.
        agent.give_back(room)


async def _meet(pair: Pair, channel: grpc.aio.Channel) -> AgentSession:
    agent = Agent(f"{pair} sender")
    join: Any = channel.unary_stream(f"/{_SERVICE}/{_JOIN}")
    joined: Any = None
    try:
        await agent.open()
        joined = join(pair.pack())
        joined.add_done_callback(lambda _: agent.lane.end())
        await call(joined.read())
    except BaseException:
        agent.lane.end()
        if joined is not None:
            joined.cancel()
        raise
    return AgentSession(pair, agent, joined, channel.unary_unary(f"/{_SERVICE}/{_PUT}"))


def _load() -> Any:
    import nixl  # Loads torch, and is an optional extra.

    # It tells of every agent, and on stdout.
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl


def _errors(nixl: Any) -> tuple[type[Exception], ...]:
    bindings = nixl._bindings
    return tuple(getattr(bindings, error) for error in dir(bindings) if error.endswith("Error"))


def _require() -> None:
    works, reason = False, "its backend UCX is missing"
    try:
        found = _load()
    except ImportError as error:
        reason = str(error)
    else:
        try:
            works = "UCX" in found.nixl_agent("probe", found.nixl_agent_config(backends=["UCX"])).backends
        except Exception as error:  # noqa: BLE001  (NIXL's own have no root but this.)
            reason = str(error) or type(error).__name__
    if not works:
        raise ConfigError(
            f"transport nixl does not work here ({reason}); pip install 'kvferry[nixl]', or set "
            "transfer.transport: grpc",
            param="transfer.transport",
        )
