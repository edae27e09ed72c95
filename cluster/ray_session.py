"""The Ray that a cluster's processes stand on: a private one, which ends with this process, or one that it joins."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
import ray.util
from ray._private import services

from cluster import private_ray
from cluster.guard import Guard
from cluster.ports import require_listener
from workers.errors import ConfigError, KVFerryError

STOPPED = "stopped before it was ready"
_STOP_TIMEOUT_S = 5.0
# Ray's own protocol for a process that is on none of its nodes.
_RAY_CLIENT = "ray://"
# It starts a process for each of its clients, from one that has threads in gRPC.
_NO_SERVER = "Starting Ray client server failed"


class RaySession:
    def __init__(self, name: str, address: str | None, stopped: Callable[[], bool]) -> None:
        """`name`: the cluster's. `address`: of the Ray to join; None: a private one. `stopped`: asked while waiting."""
        self._name = name
        self._address = address
        self._stopped = stopped
        self._cleanup = ExitStack()
        self._guard: Guard | None = None
        self._gone = False
        # Actors of a cluster of that name, which another process has started in the Ray that is joined.
        self.found: list[str] = []

    def start(self, say: Callable[[str], None]) -> None:
        """Raises KVFerryError. Ray's own signal handlers may be in place afterwards."""
        say("starting Ray" if self._address is None else f"joining Ray at {self._address}")
        logging.getLogger("ray").setLevel(logging.ERROR)
        # On the main thread Ray would make a SIGTERM end us in the middle of its start. The thread must outlive Ray's
        # processes: the kernel kills them with the thread that started them.
        thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._cleanup.callback(thread.shutdown)
        started = thread.submit(self._init)
        while not wait([started], timeout=_STOP_TIMEOUT_S).done:
            if self._stopped() and not wait([started], timeout=_STOP_TIMEOUT_S).done:
                # Part of Ray was stopped too, and the rest would wait for it for a minute.
                say(STOPPED)
                self.watch_descendants()
                os._exit(1)
        started.result()

    @contextmanager
    def required(self) -> Iterator[None]:
        """Whatever fails inside because Ray is gone is a KVFerryError that says so."""
        try:
            yield
        except Exception as exc:
            # A client that was cut off is told so by its first call, before it knows itself.
            if not isinstance(exc, ConnectionError) and self.there:
                raise
            self._gone = True
            raise KVFerryError(f"Ray at {self._address or 'this machine'} is gone, and with it this cluster") from exc

    @property
    def there(self) -> bool:
        return not self._gone and bool(ray.is_initialized())

    def watch_descendants(self) -> None:
        """Of a private Ray: the processes that are there by now end with this one, even a killed one."""
        if self._guard:
            self._guard.watch_descendants()

    def stop(self) -> None:
        """Harmless when done already."""
        if not self._gone:
            ray.shutdown()
        self._cleanup.close()

    def _init(self) -> None:
        if self._address is None:
            self._start_private()
        else:
            self._join(self._address)

    def _join(self, address: str) -> None:
        require_listener(address.removeprefix(_RAY_CLIENT))
        try:
            ray.init(address, **self._driver())
        except (ConnectionError, RuntimeError, ValueError) as exc:
            # Where a traceback follows, its last line says why.
            lines = str(exc).strip().split("\n")
            reason = " ".join(dict.fromkeys((lines[0], lines[-1])))
            if _NO_SERVER in reason:
                reason += (
                    " Try again, or start Ray's head with GRPC_ENABLE_FORK_SUPPORT=0, without which it dies at times."
                )
            raise ConfigError(f"address: cannot join Ray at {address}: {reason}", param="address") from None
        self.found = list(ray.util.list_named_actors())

    def _start_private(self) -> None:
        folder = private_ray.make_folder()
        self._guard = self._cleanup.enter_context(Guard(folder))
        # For 127.0.0.1 Ray would take the machine's own address, and listen on every one.
        services.resolve_ip_for_localhost = lambda host: host  # type: ignore[no-untyped-call,assignment,unused-ignore]
        ray.init(**private_ray.settings(folder), **self._driver())
        self.watch_descendants()
        private_ray.step_aside()

    def _driver(self) -> dict[str, Any]:
        return {"namespace": f"kvferry-{self._name}", "log_to_driver": False, "logging_level": "error"}
