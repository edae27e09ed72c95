"""A worker's own /metrics (telemetry.metrics_port), on its event loop."""

from __future__ import annotations

import asyncio
import socket

from prometheus_client import CollectorRegistry, make_asgi_app

from protos import router_pb2
from router.server import listen, server_of
from router.worker_metrics import WorkerMetrics
from workers.errors import ConfigError
from workers.tls import membership
from workers.worker import Worker

_TIMEOUT_S = 10.0
# Workers of one host.
_MAX_PORTS = 128


class MetricsPort:
    def __init__(self, worker: Worker, first_port: int) -> None:
        """Raises ConfigError when none of the ports is free."""
        self._worker = worker
        host = worker.config.host
        self._listener = _first_free(host, first_port)
        registry = CollectorRegistry()
        registry.register(WorkerMetrics(self._status))
        self._server = server_of(make_asgi_app(registry), _TIMEOUT_S, membership(worker.config.security))
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        worker.metrics_address = f"{host}:{self._listener.getsockname()[1]}"

    async def close(self) -> None:
        self._server.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)

    def _status(self) -> list[router_pb2.WorkerStatus]:
        stats = self._worker.stats()
        return [router_pb2.WorkerStatus(address=self._worker.address, state=router_pb2.WORKER_STATE_READY, stats=stats)]


def _first_free(host: str, first_port: int) -> socket.socket:
    if not first_port:
        return listen(host, 0)
    for port in range(first_port, min(first_port + _MAX_PORTS, 1 << 16)):
        try:
            return listen(host, port)
        except ConfigError:
            continue
    raise ConfigError(
        f"telemetry.metrics_port: none of {_MAX_PORTS} ports from {first_port} on is free on {host}; choose another, "
        "or 0 for any",
        param="telemetry.metrics_port",
    )
