"""The hash model with its KV in a real pool, which other workers may read where it lies."""

from __future__ import annotations

import numpy as np
import torch

from tests.fake_model import HashRunner
from workers.config import EngineConfig
from workers.engine.executor import HostPool
from workers.engine.kv_pool import KVPool


class PooledRunner(HashRunner):
    def __init__(self, config: EngineConfig, fingerprint: str = "hash", share_pool: bool = True) -> None:
        super().__init__(config, fingerprint)
        self.kv_pool = KVPool(self.layout, self.num_blocks, torch.device("cpu"), share_pool)
        self.pool = self.kv_pool.tensor.numpy().view(np.uint32).reshape(self.pool.shape)

    @property
    def host_pool(self) -> HostPool:  # type: ignore[override]
        return self.kv_pool
