"""Time on a GPU, and the rates that nothing on it exceeds: measured in the same run, not out of a data sheet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


def seconds(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """The median of `repeats` calls, after two that warm up, from launch to end. On a CPU, where kernels are
    interpreted and time means nothing, one call."""
    if device.type == "cpu":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    for _ in range(2):
        call()
    return statistics.median(_once(call) for _ in range(repeats))


def _once(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Rates:
    """Bytes and operations a second."""

    memory: float
    matrix: float
    to_host: float
    to_device: float


def measure_rates(device: torch.device, dtype: torch.dtype, tiny: bool) -> Rates:
    """Memory: bytes read and written by a copy of gigabytes; matrix: the best of three sizes of square products; host:
    to and from pinned memory."""
    num_bytes = 1 << (16 if tiny else 31)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    memory = 2 * num_bytes / seconds(lambda: target.copy_(source), device)
    part = source[: num_bytes // 8]
    pinned = torch.empty(len(part), dtype=torch.uint8, pin_memory=device.type == "cuda")
    to_host = len(part) / seconds(lambda: pinned.copy_(part, non_blocking=True), device, 5)
    to_device = len(part) / seconds(lambda: part.copy_(pinned, non_blocking=True), device, 5)
    sizes = (64,) if tiny else (4096, 8192, 12288)
    return Rates(memory, max(_matrix_rate(size, device, dtype) for size in sizes), to_host, to_device)


def _matrix_rate(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Of random numbers: a GPU multiplies zeros faster."""
    a, b = (torch.randn((size, size), device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device, 10)
