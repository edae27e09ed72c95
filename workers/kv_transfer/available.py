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

# What auto tries, best first. Not gloo, though it was measured at 0.3 to 0.7 GB/s where grpc made 0.3 (two processes
# on two busy cores): it needs free ports in both directions beside the worker's own, and whether they are open shows
# only at the first frame. grpc works wherever workers can talk at all. Not nixl either (0.5 to 1 GB/s by TCP): it needs
# ports as well, and does not tell whether it has found RDMA.
_AUTO: dict[Device, tuple[str, ...]] = {"cpu": ("shm", "grpc"), "cuda": ("nccl", "shm", "grpc")}


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
    found = []
    for name in _AUTO[device]:
        try:
            found.append(makers[name]())
        except ConfigError as error:
            logger.warning("transport: auto goes without %s: %s", name, error.message)
    return Transports(found)


def _on_groups(name: str, device: Device, network: Network, incarnation: str) -> Transport:
    # They load torch, which no other transport needs.
    from workers.kv_transfer.nccl import NcclTransport
    from workers.kv_transfer.pair_group import Gloo, Nccl

    return NcclTransport(Nccl(device) if name == "nccl" else Gloo(), network, incarnation)


def _nixl(network: Network, incarnation: str) -> Transport:
    from workers.kv_transfer.nixl import NixlTransport

    return NixlTransport(network, incarnation)
