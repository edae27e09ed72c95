"""Ray's dashboard, monitors and agents do nothing for us, and Ray starts them whatever it is told: they come last."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from cluster.guard import descendants

# What starts processes and tells of their deaths.
_NEEDED = ("gcs_server", "raylet")
_LOWEST = 19


def step_aside() -> None:
    """All Python processes that Ray has started under this one go to the lowest priority. Actors, which the raylet
    starts later, do not: they have its own."""
    for pid in descendants(os.getpid()):
        # Processes may end, and threads, each of which has a priority of its own.
        with suppress(OSError):
            process = Path(f"/proc/{pid}")
            if _is_ray_s(process):
                for thread in os.listdir(process / "task"):
                    os.setpriority(os.PRIO_PROCESS, int(thread), _LOWEST)


def _is_ray_s(process: Path) -> bool:
    name = (process / "comm").read_text(encoding="utf-8").strip()
    command = (process / "cmdline").read_bytes()
    return name not in _NEEDED and (command.startswith(b"ray::") or b"/ray/" in command)
