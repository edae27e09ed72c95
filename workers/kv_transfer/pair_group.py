"""A torch.distributed group of two processes, made without a global world: a receiver, rank 0, and a sender, rank 1.

Bytes go from 1 to 0, in the order in which both sides ask for it: NCCL pairs sends and receives by nothing else. What
blocks stands on a thread of the group's own. A group in which anything failed is aborted and never used again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Coroutine
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from workers.errors import ConfigError
from workers.kv_transfer.lane import Lane

RECEIVER, SENDER = 0, 1
# Nothing is ever sent under it: a receive that can only time out.
_NO_TAG = 1 << 20


class Backend(Protocol):
    """One of torch.distributed's ways between two processes."""

    name: str
    # Where it sends from and receives into.
    device: torch.device

    def identity(self) -> bytes:
        """Of the device; two ends of a group need two."""

    def connect(self, store: dist.Store, rank: int, host: str, timeout_s: float) -> Any:
        """The group, once the other rank has called it too. `host` is where this side can be reached."""

    def abort(self, group: Any, rank: int) -> None:
        """End what waits in it, on both sides."""


class Gloo:
    name = "gloo"
    device = torch.device("cpu")

    def identity(self) -> bytes:
        return b""

    def connect(self, store: dist.Store, rank: int, host: str, timeout_s: float) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # Its annotations know no options.
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        # For collectives, of which there are none.
        options._threads = 1
        options._timeout = timedelta(seconds=timeout_s)
        return gloo(store, rank, 2, options)

    def abort(self, group: Any, rank: int) -> None:
        # Gloo's own abort does not reach point-to-point. But one wait that times out closes the connection, and so
        # ends all others.
        try:
            group.recv([torch.empty(1)], 1 - rank, _NO_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return
        raise AssertionError("something was sent under a tag that nobody uses")


class Nccl:
    """Written for one GPU on each side. It has not been run between two."""

    name = "nccl"

    def __init__(self, device: str) -> None:
        """Raises ConfigError without CUDA and NCCL."""
        if device != "cuda":
            raise ConfigError(
                f"transport nccl moves KV between GPUs, and this worker's device is {device}; set device: cuda, or "
                "transfer.transport: gloo, shm or grpc",
                param="transfer.transport",
            )
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise ConfigError(
                "transport nccl needs an NVIDIA GPU and a torch built with CUDA and NCCL; set transfer.transport: grpc",
                param="transfer.transport",
            )
        self.device = torch.device("cuda", torch.cuda.current_device())
        # Errors are to be raised by wait(); torch's own answer to a peer's death is to end this process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")

    def identity(self) -> bytes:
        return str(torch.cuda.get_device_properties(self.device).uuid).encode()

    def connect(self, store: dist.Store, rank: int, host: str, timeout_s: float) -> Any:
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        # A peer that dies while the communicator is made must not hold this side for ever.
        options.config.blocking = 0
        return dist.ProcessGroupNCCL(store, rank, 2, options)

    def abort(self, group: Any, rank: int) -> None:
        group.abort()


class PairGroup:
    """This process's end. It lives on the event loop, and blocks only its lane."""

    def __init__(self, backend: Backend, rank: int, key: str) -> None:
        """`key` names both incarnations, and which of their groups it is."""
        # All of torch's errors are RuntimeErrors.
        self.lane = Lane(f"{backend.name} group {key}", (RuntimeError, OSError), self._end)
        self._key = key
        self._backend = backend
        self._rank = rank
        self._group: Any = None
        self._store: dist.Store | None = None
        # A receiver's staging on the host, as much as was ever in use at once.
        self._idle: list[torch.Tensor] = []
        # Gloo ends the process that gets more bytes than it has room for: a turn must never meet another.
        self._num_turns = 0

    async def local_host(self, peer_host: str) -> str:
        """The address of this machine from which `peer_host` is reached."""
        return await self.lane.run(lambda: _local_host(peer_host))

    async def host_store(self, host: str, timeout_s: float) -> str:
        """Open what both sides find each other by; its address."""
        self._store, port = await self.lane.run(lambda: _listening_store(host, timeout_s))
        return f"{host}:{port}"

    async def find_store(self, address: str, timeout_s: float) -> None:
        host, port = address.rsplit(":", 1)
        self._store = await self.lane.run(
            lambda: dist.TCPStore(host, int(port), timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        )

    async def connect(self, host: str, timeout_s: float) -> None:
        """Meet the other side, and be reachable for it at `host`. Raises UnavailableError."""
        assert self._store is not None, "host_store or find_store comes first"
        store = dist.PrefixStore(self._key, self._store)

        def on_thread() -> None:
            self._group = self._backend.connect(store, self._rank, host, timeout_s)

        await self.lane.run(on_thread)

    def send(self, packed: bytearray, timeout_s: float) -> Coroutine[Any, Any, None]:
        """Wait until `packed` has left; its turn is now. Raises UnavailableError."""
        tag = self._next_tag()

        def on_thread() -> None:
            data = torch.frombuffer(packed, dtype=torch.uint8).to(self._backend.device)
            self._group.send([data], RECEIVER, tag).wait(timedelta(seconds=timeout_s))

        return self.lane.start(on_thread)

    def receive(self, staging: torch.Tensor, num_bytes: int, timeout_s: float) -> Coroutine[Any, Any, None]:
        """Wait until `staging` begins with the bytes sent; their turn is now. Raises UnavailableError."""
        tag = self._next_tag()
        return self.lane.start(lambda: self._receive(staging[:num_bytes], tag, timeout_s))

    def take(self, num_bytes: int) -> torch.Tensor:
        """Staging for that many bytes: [at least num_bytes] of uint8."""
        if self._idle and len(self._idle[-1]) >= num_bytes:
            return self._idle.pop()
        self._idle.clear()  # They are too small: frames of a layout grow only a few times.
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._backend.device.type == "cuda")

    def give_back(self, staging: torch.Tensor) -> None:
        """Nobody reads or writes it any more."""
        self._idle.append(staging)

    def _next_tag(self) -> int:
        self._num_turns += 1
        return self._num_turns % _NO_TAG

    def _receive(self, staging: torch.Tensor, tag: int, timeout_s: float) -> None:
        landing = staging if self._backend.device.type == "cpu" else torch.empty_like(staging, device="cuda")
        self._group.recv([landing], SENDER, tag).wait(timedelta(seconds=timeout_s))
        if landing is not staging:
            staging.copy_(landing)

    def _end(self) -> None:
        """End what waits here and at the peer, and let go of everything."""
        if self._group is not None:
            self.lane.beside(partial(self._backend.abort, self._group, self._rank))
        self.lane.finally_run(self._let_go)

    def _let_go(self) -> None:
        if self._group is not None:
            self._backend.abort(self._group, self._rank)  # Made after it was given up.
        self._group = self._store = None
        self._idle.clear()


def _local_host(peer_host: str) -> str:
    family = socket.getaddrinfo(peer_host, 1, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer_host, 1))  # Sends nothing: it only chooses the way.
        return str(probe.getsockname()[0])


def _listening_store(host: str, timeout_s: float) -> tuple[dist.Store, int]:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port
