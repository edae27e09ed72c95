"""Sums over the ranks of one worker by torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

# A rank that lets the others wait for longer is given up.
TIMEOUT_S = 60.0


class RankGroup:
    """Implements Ranks. No part of torch's global world, so that a process may be in several."""

    def __init__(self, rank: int, size: int, device: str) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        # One of torch's process groups, whose stubs lag behind.
        self._group: Any = None

    def connect(self, meeting: Path) -> None:
        """Return when all ranks are there. `meeting`: a file for this group alone, which is not there yet."""
        store = FileStore(str(meeting), self.size)
        self._group = _MAKERS[self._device](store, self.rank, self.size)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """In place. Raises RuntimeError when a rank has died or does not come."""
        self._group.allreduce([x]).wait()
        return x


def _gloo(store: FileStore, rank: int, size: int) -> Any:
    group: Any = dist.ProcessGroupGloo
    options = group._Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    # All ranks are on one machine, and nobody else is to reach them.
    options._devices = [group.create_device(hostname="127.0.0.1")]
    return group(store, rank, size, options)


def _nccl(store: FileStore, rank: int, size: int) -> Any:
    group: Any = dist.ProcessGroupNCCL
    options = group.Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return group(store, rank, size, options)


_MAKERS: dict[str, Callable[[FileStore, int, int], Any]] = {"cpu": _gloo, "cuda": _nccl}
