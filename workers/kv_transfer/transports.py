"""The ways for KV to travel that a worker has, and which of them is taken to each peer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import grpc.aio

from workers.errors import LayoutMismatchError
from workers.kv_transfer.base import KVReceiver, Transport


class Transports:
    """In the order of preference."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._by_name = {transport.name: transport for transport in transports}

    def serve(self, receiver: KVReceiver, server: grpc.aio.Server) -> None:
        for transport in self._by_name.values():
            transport.serve(receiver, server)

    def reachable(self, receiver: KVReceiver, address: str) -> None:
        for transport in self._by_name.values():
            transport.reachable(receiver, address)

    def offers(self) -> dict[str, bytes]:
        return {name: transport.offer() for name, transport in self._by_name.items()}

    def accepts(self, name: str, offer: bytes) -> bool:
        return name in self._by_name and self._by_name[name].accepts(offer)

    def best(self, accepted: Collection[str], address: str) -> Transport:
        """The one to use to the peer at `address`. Raises LayoutMismatchError when there is none."""
        for name, transport in self._by_name.items():
            if name in accepted:
                return transport
        raise LayoutMismatchError(
            f"KV cannot go by {_list(self._by_name)} to the worker at {address}, which takes {_list(accepted)} from "
            "here; set transfer.transport: grpc on both, or auto",
            param="transport",
        )


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
