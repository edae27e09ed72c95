"""Who a worker must be: one that says so, and of the role that its cluster has it in."""

from __future__ import annotations

from dataclasses import dataclass

from protos.worker_pb2 import WorkerStats
from workers.config import Role
from workers.errors import ConfigError, UnavailableError


@dataclass(frozen=True, slots=True)
class Member:
    """What a router is told of a worker of its cluster."""

    # None: whatever it says.
    role: Role | None = None
    # It gets no new requests, and what it has goes on.
    draining: bool = False


def require_expected(stats: WorkerStats, address: str, configured: Role | None) -> None:
    """Raise UnavailableError for one that has not said who it is yet, ConfigError for one of another role: it would
    take requests away from those meant, and nobody would notice."""
    if not (stats.incarnation and stats.role):
        raise UnavailableError(f"who answers at {address} does not say who it is")
    if configured not in (None, stats.role):
        raise ConfigError(
            f"{stats.name} at {address} says that its role is {stats.role}, and the config says {configured}; "
            f"restart it with role: {configured}"
        )
