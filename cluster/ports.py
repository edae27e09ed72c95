"""Who listens where, and who could."""

from __future__ import annotations

import errno
import socket

from router.config import RouterConfig
from workers.errors import ConfigError

_CONNECT_TIMEOUT_S = 5.0


def refuse_busy_ports(router: RouterConfig) -> None:
    """Raises ConfigError."""
    for key, port in (("http_port", router.http_port), ("grpc_port", router.grpc_port)):
        if port and (reason := why_not_bindable(router.host, port)):
            raise ConfigError(f"router.{key}: {router.host}:{port}: {reason}", param=f"router.{key}")


def why_not_bindable(host: str, port: int) -> str | None:
    """None when a server could listen there now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror:
        return "no such host; use 127.0.0.1, 0.0.0.0 or an address of this machine"
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            return "the port is in use; stop what uses it, or choose another (0: any free one)"
        return f"cannot listen there ({exc.strerror}); use 127.0.0.1, 0.0.0.0 or an address of this machine"
    return None


def require_listener(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as exc:
        reason = exc.strerror or exc
        raise ConfigError(
            f"address: no Ray answers at {address} ({reason}): start one there", param="address"
        ) from None
