"""`kvferry up` and `down`: one process owns a cluster from start to stop, in the foreground or behind `--detach`."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from cluster import private_ray
from cluster.caveats import caveats
from cluster.config import ClusterConfig
from cluster.guard import start_time
from cluster.state import State, StateFolder
from workers.errors import ConfigError, KVFerryError

if TYPE_CHECKING:
    from cluster.endpoints import Endpoints
    from cluster.launch import Cluster

_POLL_S = 0.1
_DOWN_TIMEOUT_S = 60.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SERVER_MODULES = ("ray", "torch", "fastapi", "uvicorn", "tokenizers", "safetensors", "gguf", "numpy", "sqlalchemy")
Say = Callable[[str], None]


class StopSignals:
    """Ctrl-C and its kin only set a flag: however often they come, everything is still taken down in order."""

    def __init__(self) -> None:
        self.stopped = False

    def install(self) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def __call__(self) -> bool:
        return self.stopped


@contextmanager
def running(config: ClusterConfig, say: Say) -> Iterator[tuple[Cluster, Endpoints]]:
    """A cluster that is up inside the `with` and gone after it. Raises KVFerryError when it cannot start.

    Meanwhile sys.stdout is a log file: `say` must hold the real one.
    """
    require_server_extra()
    folder = StateFolder(config.name)
    stop = StopSignals()
    # Ray prints the deaths of its workers to stdout, whatever it is told.
    with folder.claim(), (folder.logs / "ray.log").open("w") as log, redirect_stdout(log):
        _refuse_what_cannot_start(config, say)
        started_at_s = time.time()
        if config.address is None:
            private_ray.set_environment(config.security)
        stop.install()
        from cluster.launch import Cluster

        cluster = Cluster(config, folder.logs, stop)
        try:
            cluster.start_ray(say)
            stop.install()
            endpoints = cluster.start(say)
            folder.write(State(os.getpid(), started_at_s, endpoints.http, endpoints.grpc, config.security.tls or ""))
            yield cluster, endpoints
        finally:
            cluster.stop()


def _refuse_what_cannot_start(config: ClusterConfig, say: Say) -> None:
    """Raises ConfigError before anything is started. A model of the hub is downloaded: once, before many ask for it."""
    # Here, where the server's packages are.
    from cluster.check import examine
    from workers.models.resolve import resolve_model

    report = examine(config, resolve_model, with_torch=False)
    report.require_none()
    if report.model is not None:
        say(f"model: {report.model}")


def serve(config: ClusterConfig, say: Say) -> None:
    """Up until Ctrl-C, SIGTERM or `kvferry down`."""
    began_s = time.monotonic()
    with running(config, say) as (cluster, endpoints):
        for caveat in caveats(config):
            say(caveat.message)
        if config.faults:
            say(f"{len(config.faults)} faults are injected: {', '.join(fault.fault for fault in config.faults)}")
        say(f"{ready_line(config.name, endpoints.http, endpoints.grpc)} (after {time.monotonic() - began_s:.1f} s)")
        cluster.wait(say, StateFolder(config.name).control)
        say("stopping")


def detach(config: ClusterConfig, path: str | None) -> State:
    """Start `kvferry up` in the background and wait until it is ready. Raises its error when it fails."""
    require_server_extra()
    folder = StateFolder(config.name)
    folder.refuse_second()  # Before its log is begun anew.
    folder.logs.mkdir(parents=True, exist_ok=True)
    log = folder.logs / "up.log"
    flags = ["--allow-faults"] if config.faults else []
    command = [sys.executable, "-m", "cluster.cli", "up", *flags, *([path] if path else [])]
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        return _wait_until_ready(child, folder, log)
    except BaseException:
        with suppress(ProcessLookupError):
            child.terminate()
        child.wait()
        raise


def _wait_until_ready(child: subprocess.Popen[bytes], folder: StateFolder, log: Path) -> State:
    while child.poll() is None:
        state = folder.running()
        if state and state.pid == child.pid and state.ready:
            return state
        time.sleep(_POLL_S)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [f"it ended silently; see {log}"]
    raise (ConfigError if child.returncode == 2 else KVFerryError)(lines[-1].removeprefix("kvferry: "))


def down(name: str) -> bool:
    """Stop the cluster of that name and wait until all of it is gone; False when none runs. KVFerryError when it does
    not end."""
    folder = StateFolder(name)
    signalled: dict[int, str | None] = {}
    give_up_s = time.monotonic() + _DOWN_TIMEOUT_S
    while folder.locked() or any(ticks and start_time(pid) == ticks for pid, ticks in signalled.items()):
        state = folder.running()
        if state and state.pid not in signalled:
            signalled[state.pid] = start_time(state.pid)
            with suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGTERM)
        if time.monotonic() > give_up_s:
            pids = ", ".join(map(str, signalled)) or "unknown"
            raise KVFerryError(f"{name} (pid {pids}) has not ended after {_DOWN_TIMEOUT_S:.0f} s: end it with kill -9")
        time.sleep(_POLL_S)
    return bool(signalled)


def ready_line(name: str, http: str, grpc: str) -> str:
    return f"{name} is ready: HTTP {http}, gRPC {grpc}"


def require_server_extra() -> None:
    for module in _SERVER_MODULES:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"`kvferry up` needs {module}: pip install 'kvferry[server]'")
