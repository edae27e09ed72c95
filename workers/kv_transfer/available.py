"""The ways for KV to travel that work on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable

from workers.config import Device, TransferConfig
from workers.errors import ConfigError
from workers.kv_transfer.base import Transport
from workers.kv_transfer.grpc import GrpcTransport
from workers.kv_transfer.shm import ShmTransport
from workers.kv_transfer.transports import Transports
from workers.rpc import Network

logger = logging.getLogger(__name__)

# What auto tries, best first: what needs no port but the worker's own, and fails at once where it does not work. nccl,
# gloo and nixl need free ports in both directions, and whether they are open shows only at the first frame; nixl does
# not tell whether it has found RDMA. Who knows their network names them.
_AUTO = ("shm", "grpc")


def open_transports(config: TransferConfig, device: Device, network: Network, incarnation: str) -> Transports:
    """Those that `transfer.transport` allows. ConfigError when one that is asked for by name cannot work here."""
    makers: dict[str, Callable[[], Transport]] = {
        "shm": lambda: ShmTransport(network),
        "grpc": lambda: GrpcTransport(network),
        "nccl": lambda: _on_groups("nccl", device, network, incarnation),
        "gloo": lambda: _on_groups("gloo", device, network, incarnation),
        "nixl": lambda: _nixl(network, incarnation),
    }
    if config.transport != "auto":
        return Transports([makers[config.transport]()])
    found, missing = [], {}
    for name in _AUTO:
        try:
            found.append(makers[name]())
        except ConfigError as error:
            missing[name] = error.message
            logger.warning("transport: auto goes without %s: %s", name, error.message)
    return Transports(found, missing)


def _on_groups(name: str, device: Device, network: Network, incarnation: str) -> Transport:
    # They load torch, which no other transport needs.
    from workers.kv_transfer.nccl import NcclTransport
    from workers.kv_transfer.pair_group import Gloo, Nccl

    return NcclTransport(Nccl(device) if name == "nccl" else Gloo(), network, incarnation)


def _nixl(network: Network, incarnation: str) -> Transport:
    from workers.kv_transfer.nixl import NixlTransport

    return NixlTransport(network, incarnation)
