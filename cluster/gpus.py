"""How the GPUs that Ray finds are dealt out among workers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workers.config import WorkerConfig
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
