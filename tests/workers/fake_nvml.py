"""NVML as its manual has it, for hosts without GPUs: a module to put in the place of pynvml."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml


@dataclass
class FakeGpu:
    uuid: str
    bus_id: bytes
    # Of the time, in per cent; bytes; milliwatts.
    busy: int = 0
    used: int = 0
    total: int = 80 << 30
    power: int | None = 70_000
    # Of each link, the bus id of the GPU at its other end, or "switch".
    nvlinks: list[bytes | str] = field(default_factory=list)
    # Functions that this one does not answer, by the error's number.
    errors: dict[str, int] = field(default_factory=dict)


class FakeNvml(ModuleType):
    """`levels`: of the common ancestor of two GPUs, by their UUIDs."""

    def __init__(self, gpus: list[FakeGpu], levels: dict[frozenset[str], int] | None = None) -> None:
        super().__init__("pynvml")
        for name, value in vars(pynvml).items():
            if name.startswith("NVML") and not callable(value):
                setattr(self, name, value)
        self.NVMLError = pynvml.NVMLError
        self.gpus = gpus
        self.levels = levels or {}
        self.has_driver = True
        self.num_open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        if index >= len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._answering(self.gpus[index], "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:  # noqa: N802
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return self._answering(gpu, "nvmlDeviceGetHandleByUUID")
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetIndex(self, gpu: FakeGpu) -> int:  # noqa: N802
        return self.gpus.index(self._answering(gpu, "nvmlDeviceGetIndex"))

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return self._answering(gpu, "nvmlDeviceGetUUID").uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        self._answering(gpu, "nvmlDeviceGetName")
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=self._answering(gpu, "nvmlDeviceGetUtilizationRates").busy, memory=0)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
        self._answering(gpu, "nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.total - gpu.used)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:  # noqa: N802
        self._answering(gpu, "nvmlDeviceGetPowerUsage")
        if gpu.power is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.power

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return SimpleNamespace(busId=self._answering(gpu, "nvmlDeviceGetPciInfo").bus_id)

    def nvmlDeviceGetTopologyCommonAncestor(self, one: FakeGpu, other: FakeGpu) -> int:  # noqa: N802
        self._answering(one, "nvmlDeviceGetTopologyCommonAncestor")
        return self.levels[frozenset((one.uuid, other.uuid))]

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:  # noqa: N802
        self._link(gpu, link)
        return int(pynvml.NVML_FEATURE_ENABLED)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: FakeGpu, link: int) -> int:  # noqa: N802
        is_switch = self._link(gpu, link) == "switch"
        return int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if is_switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: FakeGpu, link: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=self._link(gpu, link))

    def _link(self, gpu: FakeGpu, link: int) -> bytes | str:
        if link >= len(gpu.nvlinks):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return gpu.nvlinks[link]

    def _answering(self, gpu: FakeGpu, function: str) -> FakeGpu:
        if function in gpu.errors:
            raise pynvml.NVMLError(gpu.errors[function])
        return gpu
