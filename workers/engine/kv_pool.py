"""The KV of every block of one worker, in one tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from workers.config import CacheConfig
from workers.engine.executor import Buffer
from workers.errors import ConfigError, FrameError
from workers.kv_transfer.layout import KVLayout
from workers.layers.kv_codec import POOL_DTYPES, cast, pool_width


class KVPool:
    """`tensor` is [num_layers, 2, num_blocks, block_size, num_kv_heads, pool_width] (workers/layers/kv_codec.py).

    read and write copy bits, whatever the dtype, unless read is asked for another. They may run beside a step and
    beside each other on different blocks.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        if device.type == "cpu":
            _require_memory(num_blocks * layout.block_size * layout.token_bytes)
        dtype = POOL_DTYPES[layout.dtype]
        width = pool_width(dtype, layout.head_dim)
        self.tensor = _zeros(
            (layout.num_layers, 2, num_blocks, layout.block_size, layout.num_kv_heads, width), dtype, device
        )
        self._layout = layout
        # [num_layers, 2, num_slots, num_kv_heads, pool_width]
        self._slots = self.tensor.flatten(2, 3)
        # Half words hold the bits of any width: [num_layers, 2, num_slots, half words of a token's K or V].
        self._bits = self._slots.view(torch.int16).flatten(3)

    @torch.inference_mode()
    def read(self, slots: Sequence[int], layer_start: int, layer_end: int, dtype: str | None = None) -> memoryview:
        """A copy: [layer_end - layer_start, 2, len(slots), num_kv_heads, head_bytes]; `dtype`: cast to that one."""
        if dtype is None or dtype == self._layout.dtype:
            rows = self._bits[layer_start:layer_end].index_select(2, self._index(slots))
        else:
            kept = self._slots[layer_start:layer_end].index_select(2, self._index(slots))
            rows = cast(kept, POOL_DTYPES[dtype]).view(torch.int16)
        return rows.flatten().cpu().numpy().data.cast("B")

    @torch.inference_mode()
    def write(self, slots: Sequence[int], layer_start: int, layer_end: int, payload: Buffer) -> None:
        """Put what `read` gave elsewhere into `slots`. FrameError when its size is another one."""
        layers = layer_end - layer_start
        require_size(payload, self._layout, layers, len(slots))
        rows = torch.empty((layers, 2, len(slots), self._bits.shape[-1]), dtype=torch.int16)
        # Through numpy, which takes read-only buffers without a complaint.
        rows.numpy().reshape(-1)[:] = np.frombuffer(payload, dtype=np.int16)
        self._bits[layer_start:layer_end].index_copy_(2, self._index(slots), rows.to(self._bits.device))

    @torch.inference_mode()
    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """The KV of each (source, target) block, within the pool."""
        sources, targets = self._index([s for s, _ in blocks]), self._index([t for _, t in blocks])
        self.tensor.index_copy_(2, targets, self.tensor.index_select(2, sources))

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._bits.device)


def require_size(payload: Buffer, layout: KVLayout, num_layers: int, num_tokens: int) -> None:
    """Raise FrameError unless `payload` is KV of so many tokens and layers of that layout."""
    wanted = num_layers * num_tokens * layout.token_bytes_per_layer
    received = memoryview(payload).nbytes
    if received != wanted:
        raise FrameError(f"KV of {num_tokens} tokens and {num_layers} layers is {wanted} bytes, not {received}")


def _require_memory(num_bytes: int) -> None:
    """Pages are taken when they are first used: what does not fit would be found out in the middle of a request."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > installed:
        raise ConfigError(
            f"the KV pool of {num_bytes} bytes is larger than this machine's memory of {installed}; "
            "lower kv_cache_memory_bytes or num_gpu_blocks_override",
            param="kv_cache_memory_bytes",
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy leaves zeroing to the kernel, page by page at first use; torch.zeros would touch the whole pool now.
    half_words = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize // 2), dtype=np.int16)
    return torch.from_numpy(half_words).view(dtype)


def num_pool_blocks(config: CacheConfig, token_bytes: int, max_model_len: int) -> int:
    """Blocks of the pool, for KV of so many bytes a token. ConfigError when they cannot hold one request of
    max_model_len tokens."""
    block_bytes = token_bytes * config.block_size
    num_blocks = config.num_gpu_blocks_override or config.kv_cache_memory_bytes // block_bytes
    needed = -(-max_model_len // config.block_size)
    if num_blocks >= needed:
        return num_blocks
    key, least = "kv_cache_memory_bytes", needed * block_bytes
    if config.num_gpu_blocks_override:
        key, least = "num_gpu_blocks_override", needed
    raise ConfigError(
        f"the KV pool's {num_blocks} blocks hold {num_blocks * config.block_size} tokens, fewer than one request of "
        f"max_model_len {max_model_len}; raise {key} to {least} or lower max_model_len",
        param=key,
    )
