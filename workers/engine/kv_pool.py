"""The KV of every block of one worker, in one tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from workers.config import CacheConfig
from workers.engine.executor import Buffer
from workers.errors import ConfigError, FrameError
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.slots import Slots
from workers.layers.kv_codec import POOL_DTYPES, cast, pool_width

Index = npt.NDArray[np.int64]


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
        # Half words hold the bits of any width, by token and by block: [num_layers, 2, slots or blocks, half words].
        half_words = self.tensor.view(torch.int16)
        self._by_slot = half_words.view(layout.num_layers, 2, num_blocks * layout.block_size, -1)
        self._by_block = half_words.view(layout.num_layers, 2, num_blocks, -1)

    @torch.inference_mode()
    def read(self, slots: Slots, layer_start: int, layer_end: int, room: memoryview, dtype: str | None = None) -> None:
        """Copy to `room`: [layer_end - layer_start, 2, len(slots), num_kv_heads, head_bytes], cast to `dtype` if given.

        Raises FrameError when the size of `room` is another one.
        """
        layout = replace(self._layout, dtype=dtype or self._layout.dtype)
        require_size(room, layout, layer_end - layer_start, len(slots))
        if layout == self._layout:
            rows, index = self._rows(slots)
            _gather(rows[layer_start:layer_end], index, room)
        else:
            places = torch.from_numpy(np.asarray(slots, np.int64)).to(self.tensor.device)
            kept = self.tensor[layer_start:layer_end].flatten(2, 3).index_select(2, places)
            numbers = cast(kept, POOL_DTYPES[layout.dtype]).view(torch.int16)
            torch.frombuffer(room, dtype=torch.int16).copy_(numbers.flatten())

    @torch.inference_mode()
    def write(self, slots: Slots, layer_start: int, layer_end: int, payload: Buffer) -> None:
        """Put what `read` gave elsewhere into `slots`. FrameError when its size is another one."""
        require_size(payload, self._layout, layer_end - layer_start, len(slots))
        rows, index = self._rows(slots)
        _scatter(rows[layer_start:layer_end], index, payload)

    @torch.inference_mode()
    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """The KV of each (source, target) block, within the pool."""
        sources, targets = self._index([s for s, _ in blocks]), self._index([t for _, t in blocks])
        self.tensor.index_copy_(2, targets, self.tensor.index_select(2, sources))

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.tensor.device)

    def _rows(self, slots: Slots) -> tuple[torch.Tensor, Index]:
        """The KV by block where `slots` are whole blocks, which are longer runs of memory, else by token; and which."""
        index = np.asarray(slots, np.int64)
        size = self._layout.block_size
        blocks = index[::size] // size
        whole = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        return (self._by_block, blocks) if np.array_equal(whole, index) else (self._by_slot, index)


def _gather(rows: torch.Tensor, index: Index, room: memoryview) -> None:
    """Copy rows[:, :, index] to `room`."""
    if rows.device.type != "cpu":
        found = rows.index_select(2, torch.from_numpy(index).to(rows.device))
        torch.frombuffer(room, dtype=rows.dtype).copy_(found.flatten())
        return
    assert index.min() >= 0, "a slot outside the pool"
    assert index.max() < rows.shape[2], "a slot outside the pool"
    whole = _whole_rows(rows.numpy())
    # numpy copies row by row as memory, several times faster than torch copies elements, and lets other threads run.
    # "clip" since "raise" would go by way of another buffer.
    np.take(whole, index, axis=2, out=_as_rows(room, whole, len(index)), mode="clip")


def _scatter(rows: torch.Tensor, index: Index, payload: Buffer) -> None:
    """Set rows[:, :, index] to `payload`, which may be read-only."""
    if rows.device.type != "cpu":
        given = torch.from_numpy(np.frombuffer(payload, np.int16).copy()).to(rows.device)
        rows.index_copy_(2, torch.from_numpy(index).to(rows.device), given.view(*rows.shape[:2], len(index), -1))
        return
    whole = _whole_rows(rows.numpy())
    whole[:, :, index] = _as_rows(payload, whole, len(index))


def _whole_rows(words: npt.NDArray[np.int16]) -> npt.NDArray[np.void]:
    """[layers, 2, rows, half words] as [layers, 2, rows], each of them one piece of memory."""
    rows: npt.NDArray[np.void] = words.view(f"V{words.shape[-1] * words.itemsize}")[..., 0]
    return rows


def _as_rows(buffer: Buffer, like: npt.NDArray[np.void], num_rows: int) -> npt.NDArray[np.void]:
    return np.frombuffer(buffer, like.dtype).reshape(*like.shape[:2], num_rows)


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
