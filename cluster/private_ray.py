"""What a Ray of our own is given: nobody may join it, and it does not disturb who serves. ray_session.py starts it."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster import ray_tls
from cluster.guard import descendants
from workers.security_config import SecurityConfig

# Ray's least: nothing of ours goes through its object store.
_OBJECT_STORE_BYTES = 80 << 20
# Paths of Unix sockets have at most 107 characters; Ray and we append 83.
_MAX_TEMP_DIR = 24
# Workers that serve must not run at low priority, as Ray's batch workers do. Nor may Ray kill the youngest actor, a
# router, when others fill the host's memory: the kernel takes whoever uses most.
_CONFIG = {"worker_niceness": 0, "enable_metrics_collection": False, "memory_monitor_refresh_ms": 0}
# What starts processes and tells of their deaths.
_NEEDED = ("gcs_server", "raylet")
_LOWEST = 19


def set_environment(security: SecurityConfig) -> None:
    """Ray reads it when it is first imported: nobody may join, and it reports nothing."""
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
        # No port: what it would tell there, nobody asks for.
        AUTOSCALER_METRIC_PORT="-1",
        **ray_tls.of_private_ray(security),
    )


def make_folder() -> Path:
    """A new one for its files and sockets."""
    place = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="kvferry-", dir=place if len(place) <= _MAX_TEMP_DIR else "/tmp"))


def settings(folder: Path) -> dict[str, Any]:
    """Of ray.init."""
    return {
        "address": "local",
        "num_cpus": 0,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_node_ip_address": "127.0.0.1",
        "_system_config": _CONFIG,
        "_temp_dir": str(folder),
    }


def step_aside() -> None:
    """Ray's dashboard, monitors and agents do nothing for us, and Ray starts them whatever it is told: all of them that
    stem from this process go to the lowest priority. Actors, which the raylet starts later, do not: they have its own.
    """
    for pid in descendants(os.getpid()):
        # Processes may end, and threads, each of which has a priority of its own.
        with suppress(OSError):
            process = Path(f"/proc/{pid}")
            if _is_helper(process):
                for thread in os.listdir(process / "task"):
                    os.setpriority(os.PRIO_PROCESS, int(thread), _LOWEST)


def _is_helper(process: Path) -> bool:
    name = (process / "comm").read_text(encoding="utf-8").strip()
    command = (process / "cmdline").read_bytes()
    return name not in _NEEDED and (command.startswith(b"ray::") or b"/ray/" in command)
