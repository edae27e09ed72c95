"""A Ray that is not kvferry's own, of several nodes on this machine: what they have is all that tells them apart."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_START_S = 60.0
_RAY = str(Path(sys.executable).with_name("ray"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Nodes:
    """Nobody joins without its token, which is in `environment`."""

    def __init__(self, home: Path) -> None:
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray's server starts a process for each client: with gRPC's handlers of forks every third dies of it.
            "GRPC_ENABLE_FORK_SUPPORT": "0",
        }
        self._gcs_port, self._client_port = free_port(), free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="kvf-", ignore_cleanup_errors=True)
        self._nodes: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        """For a process that is on none of the nodes."""
        return f"ray://127.0.0.1:{self._client_port}"

    def start_head(self, resources: Mapping[str, float]) -> None:
        head = ["--head", "--port", str(self._gcs_port), "--ray-client-server-port", str(self._client_port)]
        self._start(resources, [*head, "--include-dashboard", "false", "--temp-dir", self._folder.name])
        _wait_for(self._client_port)

    def add(self, resources: Mapping[str, float], labels: str) -> subprocess.Popen[bytes]:
        return self._start(resources, ["--address", f"127.0.0.1:{self._gcs_port}", "--labels", labels])

    def _start(self, resources: Mapping[str, float], options: list[str]) -> subprocess.Popen[bytes]:
        few = ["--num-cpus", "0", "--object-store-memory", str(80 << 20), "--disable-usage-stats", "--block"]
        command = [_RAY, "start", *few, "--resources", json.dumps(resources), *options]
        node = subprocess.Popen(
            command, env=self.environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._nodes.append(node)
        self._wait_for_sockets()
        return node

    def _wait_for_sockets(self) -> None:
        """A node takes the first names for its sockets that no file has: two that start at once take the same, and one
        of them dies."""
        give_up_s = time.monotonic() + _START_S
        folder = Path(self._folder.name) / "session_latest" / "sockets"
        while min(len(list(folder.glob(f"{kind}*"))) for kind in ("raylet", "plasma_store")) < len(self._nodes):
            assert time.monotonic() < give_up_s, "a node of Ray has not started"
            time.sleep(0.05)

    def stop(self) -> None:
        for node in reversed(self._nodes):
            kill_node(node)
        self._folder.cleanup()


def kill_node(node: subprocess.Popen[bytes]) -> None:
    """All of its processes at once, as when its machine goes."""
    for pid in _session_of(node.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait()


def _session_of(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def _wait_for(port: int) -> None:
    give_up_s = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < give_up_s, "Ray's head has not started"
            time.sleep(0.1)


@contextmanager
def nodes(home: Path) -> Iterator[Nodes]:
    """One such Ray at a time: each lets the servers of its clients listen at 23000 and what follows, and does not look
    whether another's do."""
    with (Path(tempfile.gettempdir()) / f"kvferry-tests-ray-client-{os.getuid()}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started = Nodes(home)
        try:
            yield started
        finally:
            started.stop()
