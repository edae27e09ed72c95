"""How long a process took until it was ready, phase by phase."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from protos import worker_pb2 as pb

# Seconds by name, in their order.
Phases = Mapping[str, float]


class StartUp:
    """Phases follow each other without gaps; seconds are of the wall clock, which all processes of a host share."""

    def __init__(self, began_unix_s: float | None = None) -> None:
        """None: now."""
        self._ended_s = time.time() if began_unix_s is None else began_unix_s
        self.phases: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """What began where the phase before ended is over."""
        now_s = time.time()
        self.phases[phase] = max(0.0, now_s - self._ended_s)
        self._ended_s = now_s


def process_began_unix_s() -> float:
    """When this process was started, to 10 ms."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return time.time() - (uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def phases_to_proto(phases: Phases) -> list[pb.StartPhase]:
    return [pb.StartPhase(name=name, seconds=seconds) for name, seconds in phases.items()]
