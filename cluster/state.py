"""What `up` leaves for the other commands: ~/.kvferry/NAME/ with a lock, state.json and logs/.

The lock is held exactly as long as the cluster's process lives: what a killed one leaves fools nobody.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from workers.errors import ConfigError

_CLAIM_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class State:
    """One running cluster. Endpoints are empty until it is ready."""

    pid: int
    # Unix time.
    started_at_s: float
    http_endpoint: str = ""
    grpc_endpoint: str = ""
    # security.tls, for who asks it from here.
    tls: str = ""

    @property
    def ready(self) -> bool:
        return bool(self.grpc_endpoint)


class StateFolder:
    def __init__(self, name: str, home: Path | None = None) -> None:
        self.name = name
        self.path = (home or Path.home()) / ".kvferry" / name
        self.logs = self.path / "logs"
        # The socket at which its controller is asked (control.py).
        self.control = self.path / "control"
        self._state = self.path / "state.json"
        self._lock = self.path / "lock"

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Be the one cluster of this name. Raises ConfigError when another process is."""
        self.logs.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not self._take(lock):
                raise ConfigError(self._already_up())
            try:
                self.write(State(os.getpid(), time.time()))
                yield
            finally:
                self._state.unlink(missing_ok=True)
        finally:
            os.close(lock)

    def refuse_second(self) -> None:
        """Raises ConfigError when a cluster of this name is up."""
        if self.locked():
            raise ConfigError(self._already_up())

    def write(self, state: State) -> None:
        draft = self._state.with_suffix(".new")
        draft.write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
        draft.replace(self._state)

    def running(self) -> State | None:
        """The state of the cluster that runs, ready or not; None when none does."""
        if not self.locked():
            return None
        try:
            return State(**json.loads(self._state.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _take(self, lock: int) -> bool:
        """Others look at the lock by taking it for a moment: try for longer than that."""
        deadline = time.monotonic() + _CLAIM_TIMEOUT_S
        while not _flock(lock, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def locked(self) -> bool:
        """Whether a cluster of this name has a process, however young."""
        try:
            lock = os.open(self._lock, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return not _flock(lock, fcntl.LOCK_SH)
        finally:
            os.close(lock)

    def _already_up(self) -> str:
        state = self.running()
        where = f" (pid {state.pid}, gRPC {state.grpc_endpoint or 'not ready yet'})" if state else ""
        down = "kvferry down" if self.name == "kvferry" else f"kvferry down --name {self.name}"
        return f"a cluster named {self.name} is already up{where}: stop it with `{down}`, or give yours another name"


def _flock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
