"""What NVML tells of GPUs: load, memory, power, and how they reach each other. Nothing, where there is no driver.

Calls take up to milliseconds each, and block: they are for threads beside the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from protos import worker_pb2 as pb


class Gpus:
    """Those that this process may use (CUDA_VISIBLE_DEVICES)."""

    def __init__(self) -> None:
        # By UUID: they stay as they are.
        self._links: dict[str, list[pb.GpuLink]] = {}

    def read(self) -> list[pb.GpuStats]:
        """A GPU that does not answer is left out; what one does not know is unset."""
        with opened() as nvml:
            found = (self._read(nvml, handle) for handle in visible_gpus(nvml)) if nvml else ()
            return [stats for stats in found if stats]

    def _read(self, nvml: Any, handle: Any) -> pb.GpuStats | None:
        uuid: str | None = known(nvml, "nvmlDeviceGetUUID", handle)
        if uuid is None:
            return None
        if uuid not in self._links:
            self._links[uuid] = list(_links(nvml, handle))
        stats = pb.GpuStats(uuid=uuid, links=self._links[uuid])
        stats.index = known(nvml, "nvmlDeviceGetIndex", handle) or 0
        stats.name = known(nvml, "nvmlDeviceGetName", handle) or ""
        if rates := known(nvml, "nvmlDeviceGetUtilizationRates", handle):
            stats.utilization = rates.gpu / 100
        if memory := known(nvml, "nvmlDeviceGetMemoryInfo", handle):
            stats.memory_used_bytes, stats.memory_total_bytes = memory.used, memory.total
        if (milliwatts := known(nvml, "nvmlDeviceGetPowerUsage", handle)) is not None:
            stats.power_w = milliwatts / 1000
        return stats


@contextmanager
def opened() -> Iterator[Any]:
    """pynvml, ready; None where there is no driver, or none that answers."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        known(pynvml, "nvmlShutdown")


def known(nvml: Any, function: str, *arguments: Any) -> Any:
    """The answer of one of NVML's functions; None where there is none, of this GPU or of this driver."""
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:
        return None


def visible_gpus(nvml: Any, environment: Mapping[str, str] = os.environ) -> list[Any]:
    """Handles of those that this process may use, by index or UUID; those that cannot be opened are left out."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return _all_gpus(nvml)
    names = [part.strip() for part in chosen.split(",") if part.strip()]
    handles = (_open(nvml, name) for name in names)
    return [handle for handle in handles if handle is not None]


def _all_gpus(nvml: Any) -> list[Any]:
    count = known(nvml, "nvmlDeviceGetCount") or 0
    handles = (known(nvml, "nvmlDeviceGetHandleByIndex", i) for i in range(count))
    return [handle for handle in handles if handle is not None]


def _open(nvml: Any, name: str) -> Any:
    if name.isdigit():
        return known(nvml, "nvmlDeviceGetHandleByIndex", int(name))
    return known(nvml, "nvmlDeviceGetHandleByUUID", name)


def _links(nvml: Any, handle: Any) -> Iterator[pb.GpuLink]:
    """To every other GPU of the host, whoever uses it."""
    own = known(nvml, "nvmlDeviceGetUUID", handle)
    by_gpu, by_switch = _nvlinks(nvml, handle)
    for other in _all_gpus(nvml):
        uuid = known(nvml, "nvmlDeviceGetUUID", other)
        if uuid is None or uuid == own:
            continue
        ancestor = known(nvml, "nvmlDeviceGetTopologyCommonAncestor", handle, other)
        pci = known(nvml, "nvmlDeviceGetPciInfo", other)
        direct = by_gpu.get(pci.busId, 0) if pci else 0
        # All that hang on switches reach each other through them.
        num_nvlinks = direct or (min(by_switch, _nvlinks(nvml, other)[1]) if by_switch else 0)
        yield pb.GpuLink(uuid=uuid, path=_paths(nvml).get(ancestor, ""), num_nvlinks=num_nvlinks)


def _nvlinks(nvml: Any, handle: Any) -> tuple[dict[Any, int], int]:
    """Active NVLinks: to other GPUs, by their bus ids, and to switches."""
    by_gpu: dict[Any, int] = {}
    by_switch = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = known(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if state != nvml.NVML_FEATURE_ENABLED:
            continue
        kind = known(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            by_switch += 1
        elif pci := known(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link):
            by_gpu[pci.busId] = by_gpu.get(pci.busId, 0) + 1
    return by_gpu, by_switch


def _paths(nvml: Any) -> dict[int, str]:
    """By the level of the common ancestor, what `nvidia-smi topo` calls it."""
    return {
        nvml.NVML_TOPOLOGY_INTERNAL: "PIX",
        nvml.NVML_TOPOLOGY_SINGLE: "PIX",
        nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        nvml.NVML_TOPOLOGY_NODE: "NODE",
        nvml.NVML_TOPOLOGY_SYSTEM: "SYS",
    }
