"""The ways for KV to travel that a worker has, and which of them is taken to each peer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc.aio

from protos import kv_transfer_pb2 as pb
from workers.errors import LayoutMismatchError
from workers.kv_transfer.base import KVReceiver, Refusal, Transport


@dataclass(frozen=True, slots=True)
class Way:
    """The transport to a peer."""

    transport: Transport
    # Of those that would be better, why none is taken; empty: there is none.
    why: str = ""
    # One of those ought to work.
    is_fault: bool = False


class Transports:
    """In the order of preference."""

    def __init__(self, transports: Sequence[Transport], missing: Mapping[str, str] | None = None) -> None:
        """`missing`: the reasons why others, which would be better, do not work on this machine."""
        self._by_name = {transport.name: transport for transport in transports}
        self._missing = dict(missing or {})

    def serve(self, receiver: KVReceiver, server: grpc.aio.Server) -> None:
        for transport in self._by_name.values():
            transport.serve(receiver, server)

    def reachable(self, receiver: KVReceiver, address: str) -> None:
        for transport in self._by_name.values():
            transport.reachable(receiver, address)

    def offers(self) -> dict[str, bytes]:
        return {name: transport.offer() for name, transport in self._by_name.items()}

    def refusals(self, offers: Mapping[str, bytes]) -> dict[str, Refusal]:
        """By name, why frames cannot come by those of a sender's transports that are not accepted."""
        found = {name: self._refusal(name, offer) for name, offer in offers.items()}
        return {name: refusal for name, refusal in found.items() if refusal is not None}

    def _refusal(self, name: str, offer: bytes) -> Refusal | None:
        if transport := self._by_name.get(name):
            return transport.refusal(offer)
        if reason := self._missing.get(name):
            return Refusal(reason, is_fault=True)
        return Refusal(f"its transfer.transport allows {_list(self._by_name)} alone")

    def best(self, answer: pb.ConnectResponse, address: str) -> Way:
        """The one to use to the peer at `address`. Raises LayoutMismatchError when there is none."""
        reasons = [f"not {name}: {reason}" for name, reason in self._missing.items()]
        is_fault = False
        for name, transport in self._by_name.items():
            if name in answer.transports:
                return Way(transport, "; ".join(reasons), is_fault)
            refusal = answer.refused[name]
            reasons.append(f"not {name}: {refusal.reason or 'it does not say why'}")
            is_fault |= refusal.is_fault
        raise LayoutMismatchError(
            f"KV cannot go by {_list(self._by_name)} to the worker at {address}, which takes "
            f"{_list(answer.transports)} from here ({'; '.join(reasons)}); set transfer.transport: grpc on both, or "
            "auto",
            param="transport",
        )


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
