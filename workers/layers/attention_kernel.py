"""Which kernel computes attention: one for each kind of device."""

from __future__ import annotations

from typing import Protocol

import torch

from workers.engine.batch import StepBatch
from workers.errors import ConfigError
from workers.layers.attention import PagedAttention


class AttentionKernel(Protocol):
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, batch: StepBatch
    ) -> torch.Tensor:
        """As PagedAttention's."""


class MakeKernel(Protocol):
    def __call__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> AttentionKernel:
        """As PagedAttention's constructor."""


def attention_kernel(device: torch.device) -> MakeKernel:
    """ConfigError where the device's kernels cannot be had."""
    if device.type == "cpu":
        return PagedAttention
    try:
        # Not installed without a GPU.
        from workers.layers.triton_attention import TritonPagedAttention
    except ImportError as error:
        raise ConfigError(f"device: cuda needs Triton ({error}); pip install 'kvferry[gpu]'", param="device") from error
    return TritonPagedAttention
