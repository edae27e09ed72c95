"""What is told of GPUs, by an NVML that this host does not have."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any, cast

import pynvml
import pytest

from cluster.gpu_watch import watch_gpus
from cluster.memory import gpu_memory
from protos import worker_pb2
from tests.workers.fake_nvml import FakeGpu, FakeNvml
from workers.nvml import Gpus
from workers.worker import Worker

LOST = pynvml.NVML_ERROR_GPU_IS_LOST


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put_in_place(nvml: FakeNvml, visible: str | None = None) -> FakeNvml:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return nvml

    return put_in_place


def pair() -> list[FakeGpu]:
    return [FakeGpu("GPU-a", b"00:01.0", busy=40, used=8 << 30, power=350_500), FakeGpu("GPU-b", b"00:02.0")]


def levels(level: int) -> dict[frozenset[str], int]:
    return {frozenset(("GPU-a", "GPU-b")): level}


def test_load_memory_and_power_are_told_in_their_units(install):
    nvml = install(FakeNvml(pair(), levels(pynvml.NVML_TOPOLOGY_SYSTEM)))
    first, second = Gpus().read()
    assert (first.index, first.uuid, first.utilization) == (0, "GPU-a", 0.4)
    assert (first.memory_used_bytes, first.memory_total_bytes, first.power_w) == (8 << 30, 80 << 30, 350.5)
    assert (second.index, second.utilization) == (1, 0.0)
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("level", "path"),
    [
        (pynvml.NVML_TOPOLOGY_SINGLE, "PIX"),
        (pynvml.NVML_TOPOLOGY_MULTIPLE, "PXB"),
        (pynvml.NVML_TOPOLOGY_HOSTBRIDGE, "PHB"),
        (pynvml.NVML_TOPOLOGY_NODE, "NODE"),
        (pynvml.NVML_TOPOLOGY_SYSTEM, "SYS"),
    ],
)
def test_paths_have_nvidia_smis_names(level, path, install):
    install(FakeNvml(pair(), levels(level)))
    assert [(link.uuid, link.path, link.num_nvlinks) for link in Gpus().read()[0].links] == [("GPU-b", path, 0)]


def test_nvlinks_are_counted_to_the_gpu_at_their_other_end(install):
    gpus = pair()
    gpus[0].nvlinks = [b"00:02.0", b"00:02.0", b"00:09.0"]
    gpus[1].nvlinks = [b"00:01.0", b"00:01.0"]
    install(FakeNvml(gpus, levels(pynvml.NVML_TOPOLOGY_NODE)))
    assert [link.num_nvlinks for gpu in Gpus().read() for link in gpu.links] == [2, 2]


def test_over_switches_two_gpus_have_the_links_of_the_one_that_has_fewer(install):
    gpus = pair()
    gpus[0].nvlinks, gpus[1].nvlinks = ["switch"] * 18, ["switch"] * 16
    install(FakeNvml(gpus, levels(pynvml.NVML_TOPOLOGY_SYSTEM)))
    assert [link.num_nvlinks for gpu in Gpus().read() for link in gpu.links] == [16, 16]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-a", "GPU-b"]),
        ("1", ["GPU-b"]),
        ("1,0", ["GPU-b", "GPU-a"]),
        ("GPU-b", ["GPU-b"]),
        ("", []),
        ("7", []),
    ],
)
def test_only_visible_gpus_are_told_of_in_their_order(visible, uuids, install):
    install(FakeNvml(pair(), levels(pynvml.NVML_TOPOLOGY_SYSTEM)), visible)
    assert [gpu.uuid for gpu in Gpus().read()] == uuids


def test_what_a_gpu_does_not_know_is_unset(install):
    gpus = pair()
    gpus[0].power = None
    install(FakeNvml(gpus, levels(pynvml.NVML_TOPOLOGY_SYSTEM)))
    assert [gpu.HasField("power_w") for gpu in Gpus().read()] == [False, True]


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
def test_a_gpu_that_is_lost_takes_no_other_with_it(function, install):
    gpus = pair()
    gpus[0].errors = {function: LOST}
    nvml = install(FakeNvml(gpus, levels(pynvml.NVML_TOPOLOGY_SYSTEM)))
    assert [gpu.uuid for gpu in Gpus().read()] == ["GPU-b"]
    assert nvml.num_open == 0


def test_memory_is_told_of_the_gpus_that_answer(install):
    gpus = pair()
    gpus[1].errors = {"nvmlDeviceGetMemoryInfo": LOST}
    install(FakeNvml(gpus))
    assert [(memory.total, memory.available) for memory in gpu_memory()] == [(80 << 30, 72 << 30)]


def test_without_a_driver_there_are_none(install):
    nvml = install(FakeNvml(pair()))
    nvml.has_driver = False
    assert Gpus().read() == []
    assert gpu_memory() == []


def test_here_nothing_is_replaced_and_nothing_fails():
    assert all(isinstance(gpu, worker_pb2.GpuStats) for gpu in Gpus().read())


def test_a_worker_tells_anew_what_its_process_reads(install):
    gpus = pair()
    install(FakeNvml(gpus, levels(pynvml.NVML_TOPOLOGY_SYSTEM)))

    async def main() -> list[float]:
        worker = cast(Worker, SimpleNamespace(gpus=()))
        watch = asyncio.create_task(watch_gpus(worker, period_s=0.01))
        seen = []
        for busy in (40, 90):
            gpus[0].busy = busy
            async with asyncio.timeout(2):
                while not worker.gpus or round(worker.gpus[0].utilization * 100) != busy:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            seen.append(worker.gpus[0].utilization)
        watch.cancel()
        return seen

    assert asyncio.run(main()) == [0.4, 0.9]
