"""`python -m cluster.guard FOLDER`: ends what a killed `up` would leave behind.

Ray's agents outlive a SIGKILLed owner by about a minute. This process reads a pipe whose only writer is the owner: each
line is the list of processes to end, as [pid, start time]. When the pipe closes, for whatever reason, it kills those
still there and removes Ray's FOLDER.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_EXIT_TIMEOUT_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36


class Guard:
    """The owner's side: what it was told last is gone soon after this process is, or after close()."""

    def __init__(self, folder: Path) -> None:
        # Processes whose parent dies become this one's children, not init's: descendants() still finds them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Its own session: Ctrl-C and the terminal's end must not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.guard", str(folder)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def watch_descendants(self) -> None:
        """Guard all processes that stem from this one now."""
        pipe = self._process.stdin
        assert pipe is not None
        mine = [(pid, start_time(pid)) for pid in descendants(os.getpid()) if pid != self._process.pid]
        pipe.write(json.dumps(mine) + "\n")
        pipe.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_time(pid: int) -> str | None:
    """In clock ticks since boot: with the pid, it names one process for ever. None: no such process."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else None


def descendants(root: int) -> list[int]:
    parents = {int(entry): _stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    children: dict[int, list[int]] = {}
    for pid, fields in parents.items():
        if fields:
            children.setdefault(int(fields[1]), []).append(pid)
    found, frontier = [], [root]
    while frontier:
        frontier = [child for pid in frontier for child in children.get(pid, [])]
        found += frontier
    return found


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from `state` on; the command before them may hold spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guarded: list[tuple[int, str]] = []
    for line in sys.stdin:
        guarded = json.loads(line)
    for pid, started in guarded:
        if start_time(pid) == started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
