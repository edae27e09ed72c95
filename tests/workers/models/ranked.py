"""The ranks of a model as threads of this process: what each computes, without processes or torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.workers.models.paged import CPU, Paged
from workers.engine.batch import StepBatch
from workers.models.loader import load_model, open_weights
from workers.models.shard import kv_heads_of

_TIMEOUT_S = 30.0


class ThreadRanks:
    """Implements Ranks: of `parts`, one for each rank, all take the sum."""

    def __init__(self, rank: int, parts: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(parts)
        self._parts, self._barrier = parts, barrier

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self._parts[self.rank] = x
        self._barrier.wait(_TIMEOUT_S)
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait(_TIMEOUT_S)
        return total


class RankedModel:
    """Implements Model by all of its ranks; each has a cache of its own, [num_layers, 2, num_blocks, ...]."""

    def __init__(self, path: Path, whole: Paged, size: int) -> None:
        config, shape = whole.config, whole.kv_cache.shape
        barrier, parts = threading.Barrier(size), [torch.empty(0)] * size
        self.ranks = [ThreadRanks(rank, parts, barrier) for rank in range(size)]
        self.models = [load_model(config, open_weights(path, config), whole.dtype, CPU, r) for r in self.ranks]
        self.kv_heads = [kv_heads_of(config.num_kv_heads, rank, size) for rank in range(size)]
        self.caches = [
            torch.full((*shape[:4], len(heads), shape[5]), 1e3, dtype=whole.dtype) for heads in self.kv_heads
        ]
        self._threads = ThreadPoolExecutor(size)
        self.kernels = self.models[0].kernels

    def forward(self, batch: StepBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Logits, which are the same on every rank, bit for bit."""
        first, *others = self._threads.map(self._forward, range(len(self.ranks)), [batch] * len(self.ranks))
        for logits in others:
            assert torch.equal(logits, first)
        return first

    def watch(self, layer_done: Callable[[int], None] | None) -> None:
        for model in self.models:
            model.watch(layer_done)

    def _forward(self, rank: int, batch: StepBatch) -> torch.Tensor:
        with torch.inference_mode():
            return self.models[rank].forward(batch, self.caches[rank])


def paged_over_ranks(path: Path, size: int, dtype: torch.dtype = torch.float32) -> tuple[Paged, RankedModel]:
    paged = Paged(path, dtype)
    model = RankedModel(path, paged, size)
    paged.model = model
    return paged, model
