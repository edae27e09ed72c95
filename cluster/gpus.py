"""Which devices workers may have: GPUs dealt out among them, and KV between devices of a kind."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workers.config import Device, WorkerConfig
from workers.errors import ConfigError


def gpu_share(
    worker: WorkerConfig, workers: Sequence[WorkerConfig], num_gpus: int, found_by: str = "Ray finds"
) -> float:
    """GPUs for one of the CUDA `workers`: one for each rank, or equal parts where all have one rank and GPUs are few.

    Raises ConfigError when there are too few for that.
    """
    sizes = [other.tensor_parallel_size for other in workers if other.device == "cuda"]
    if not num_gpus:
        raise ConfigError(f"device: cuda is asked for, but {found_by} no GPU: set device: cpu", param="device")
    if sum(sizes) <= num_gpus:
        return worker.tensor_parallel_size
    if max(sizes) > 1:
        raise ConfigError(
            f"the workers have {sum(sizes)} ranks on CUDA, each needs a GPU of its own, and {found_by} {num_gpus}: "
            "lower tensor_parallel_size or replicas",
            param="tensor_parallel_size",
        )
    return 1 / math.ceil(len(sizes) / num_gpus)


def no_hand_off(prefill: Device, decode: Device, transport: str) -> str:
    """Why KV cannot go from the one to the other; empty: it can."""
    if prefill != decode:
        return (
            f"prefill.device is {prefill} and decode.device is {decode}, whose kernels round differently: KV of one is "
            "not the other's; set device for both alike"
        )
    if transport == "nccl" and prefill != "cuda":
        return (
            f"transfer.transport: nccl moves KV between GPUs, and device is {prefill}; set device: cuda, or "
            "transfer.transport: gloo, shm or grpc"
        )
    return ""
