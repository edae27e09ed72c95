"""How much memory there is: of this host, or of what the container may use; and of its GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workers.nvml import known, opened, visible_gpus

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes."""

    total: int
    available: int


def host_memory() -> Memory:
    """The least of what the machine and each control group around this process allow."""
    lines = (line.split() for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    kib = {name.rstrip(":"): int(amount) for name, amount, *_ in lines}
    limits = [Memory(kib["MemTotal"] << 10, kib["MemAvailable"] << 10), *_group_limits()]
    return Memory(min(limit.total for limit in limits), min(limit.available for limit in limits))


def _group_limits() -> Iterator[Memory]:
    """Of version 2; what can be dropped of files' pages counts as available."""
    for group in _groups():
        with suppress(OSError, ValueError, KeyError):
            limit = int((group / "memory.max").read_text(encoding="ascii"))
            in_use = int((group / "memory.current").read_text(encoding="ascii"))
            counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            yield Memory(limit, max(0, limit - in_use + int(counts["inactive_file"])))


def _groups() -> Iterator[Path]:
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::/"):
                path = _CGROUPS / line.removeprefix("0::/")
                yield from (group for group in (path, *path.parents) if group.is_relative_to(_CGROUPS))


def gpu_memory() -> list[Memory]:
    """Of each GPU that processes started from here may use and that answers; none where there is no driver."""
    with opened() as nvml:
        handles = visible_gpus(nvml) if nvml else []
        infos = [known(nvml, "nvmlDeviceGetMemoryInfo", handle) for handle in handles]
    return [Memory(int(info.total), int(info.free)) for info in infos if info]
