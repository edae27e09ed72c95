"""The KV of every block of one worker, in one tensor."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from workers.engine.executor import Buffer
from workers.errors import ConfigError, FrameError
from workers.kv_transfer.kv_rows import KVRows, flat_rows, split_rows
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.rows import Crcs, Rows, aligned_zeros, copy_and_check, copy_rows
from workers.kv_transfer.segment import Segment
from workers.kv_transfer.slots import Slots
from workers.layers.kv_codec import POOL_DTYPES, cast, pool_width

logger = logging.getLogger(__name__)


class KVPool:
    """`tensor` is [num_layers, 2, num_blocks, block_size, num_kv_heads, pool_width] (workers/layers/kv_codec.py).

    read and write copy bits, whatever the dtype, unless read is asked for another. They may run beside a step and
    beside each other on different blocks.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, shared: bool = False) -> None:
        """`shared`: other processes of this host may read it where it lies; of memory, not of a GPU's."""
        dtype = POOL_DTYPES[layout.dtype]
        width = pool_width(dtype, layout.head_dim)
        shape = (layout.num_layers, 2, num_blocks, layout.block_size, layout.num_kv_heads, width)
        self._layout = layout
        self._num_slots = num_blocks * layout.block_size
        self._segment: Segment | None = None
        if device.type != "cpu":
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            return
        num_bytes = self._num_slots * layout.token_bytes
        _require_memory(num_bytes)
        if shared and num_bytes:
            self._segment = _segment(num_bytes)
        # Unlike torch.zeros, which would touch all of it now.
        segment = self._segment
        self._memory = np.frombuffer(segment.memory, np.uint8) if segment else aligned_zeros(num_bytes)
        self.tensor = torch.from_numpy(self._memory).view(dtype).view(shape)

    @torch.inference_mode()
    def read(self, slots: Slots, layer_start: int, layer_end: int, room: memoryview, dtype: str | None = None) -> None:
        """Copy to `room`: [layer_end - layer_start, 2, len(slots), num_kv_heads, head_bytes], cast to `dtype` if given.

        Raises FrameError when the size of `room` is another one.
        """
        layout = replace(self._layout, dtype=dtype or self._layout.dtype)
        require_size(room, layout, layer_end - layer_start, len(slots))
        if layout == self._layout and self.tensor.device.type == "cpu":
            self.locate(slots, layer_start, layer_end).copy_to(room)
        else:
            kept = self._by_slot(layer_start, layer_end).index_select(2, self._index(slots))
            numbers = kept if layout == self._layout else cast(kept, POOL_DTYPES[layout.dtype])
            torch.frombuffer(room, dtype=torch.int16).copy_(numbers.view(torch.int16).flatten())

    @torch.inference_mode()
    def write(self, slots: Slots, layer_start: int, layer_end: int, payload: Buffer) -> None:
        """Put what `read` gave elsewhere into `slots`. FrameError when its size is another one."""
        require_size(payload, self._layout, layer_end - layer_start, len(slots))
        given = np.frombuffer(payload, np.uint8)
        if self.tensor.device.type == "cpu":
            row_tokens, index = self._rows(slots)
            to = self._flat(index, row_tokens, layer_start, layer_end)
            copy_rows(self._memory, to, given, np.arange(len(to)), self._row_bytes(row_tokens))
        else:
            target = self._by_slot(layer_start, layer_end)
            numbers = torch.from_numpy(given.copy()).to(target.device).view(target.dtype)
            target.index_copy_(2, self._index(slots), numbers.view(*target.shape[:2], len(slots), *target.shape[3:]))

    def locate(self, slots: Slots, layer_start: int, layer_end: int) -> KVRows:
        """Where the KV that `read` copies lies, in memory that is not a GPU's."""
        row_tokens, index = self._rows(slots)
        return KVRows(
            self._segment.place if self._segment else b"",
            self._memory.data,
            first_plane=2 * layer_start,
            num_planes=2 * (layer_end - layer_start),
            plane_rows=self._num_slots // row_tokens,
            row_bytes=self._row_bytes(row_tokens),
            row_tokens=row_tokens,
            index=index,
        )

    def pull(self, slots: Slots, layer_start: int, layer_end: int, rows: KVRows) -> None:
        """As `write`, out of other memory."""
        to, of, row_bytes = self._ways(slots, layer_start, layer_end, rows)
        copy_rows(self._memory, to, rows.source, of, row_bytes)

    def pull_and_check(self, slots: Slots, layer_start: int, layer_end: int, rows: KVRows) -> Crcs:
        """As `pull`; the CRCs of what came (KVRows.crcs)."""
        to, of, row_bytes = self._ways(slots, layer_start, layer_end, rows)
        return copy_and_check(self._memory, to, rows.source, of, row_bytes, rows.token_bytes)

    def _ways(self, slots: Slots, layer_start: int, layer_end: int, rows: KVRows) -> tuple[Rows, Rows, int]:
        """To which rows which of `rows` go, and the bytes of one. Raises FrameError when they are of another shape."""
        require_size(rows, self._layout, layer_end - layer_start, len(slots))
        if rows.row_bytes != self._row_bytes(rows.row_tokens):
            raise FrameError(f"{rows.row_tokens} tokens of K or V are {rows.row_bytes} bytes at the sender")
        own_tokens, index = self._rows(slots)
        row_tokens = math.gcd(own_tokens, rows.row_tokens)
        to = self._flat(split_rows(index, own_tokens // row_tokens), row_tokens, layer_start, layer_end)
        return to, rows.rows(row_tokens), self._row_bytes(row_tokens)

    @torch.inference_mode()
    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """The KV of each (source, target) block, within the pool."""
        sources, targets = self._index([s for s, _ in blocks]), self._index([t for _, t in blocks])
        self.tensor.index_copy_(2, targets, self.tensor.index_select(2, sources))

    def _index(self, places: Slots) -> torch.Tensor:
        return torch.from_numpy(np.asarray(places, np.int64)).to(self.tensor.device)

    def _by_slot(self, layer_start: int, layer_end: int) -> torch.Tensor:
        """[layers, 2, num_slots, num_kv_heads, pool_width]"""
        return self.tensor[layer_start:layer_end].flatten(2, 3)

    def _rows(self, slots: Slots) -> tuple[int, Rows]:
        """How many tokens a row has, a block's where `slots` are whole blocks, else one; and which rows they are."""
        index = np.asarray(slots, np.int64)
        size = self._layout.block_size
        blocks = index[::size] // size
        return (size, blocks) if np.array_equal(split_rows(blocks, size), index) else (1, index)

    def _flat(self, index: Rows, row_tokens: int, layer_start: int, layer_end: int) -> Rows:
        return flat_rows(2 * layer_start, 2 * (layer_end - layer_start), self._num_slots // row_tokens, index)

    def _row_bytes(self, row_tokens: int) -> int:
        return row_tokens * self._layout.token_bytes_per_layer // 2


def require_size(payload: Buffer | KVRows, layout: KVLayout, num_layers: int, num_tokens: int) -> None:
    """Raise FrameError unless `payload` is KV of so many tokens and layers of that layout."""
    wanted = num_layers * num_tokens * layout.token_bytes_per_layer
    received = len(payload) if isinstance(payload, KVRows) else memoryview(payload).nbytes
    if received != wanted:
        raise FrameError(f"KV of {num_tokens} tokens and {num_layers} layers is {wanted} bytes, not {received}")


def _segment(num_bytes: int) -> Segment | None:
    """None where there is no such memory, and others get copies: who forces shm is told by its transport."""
    try:
        return Segment(num_bytes)
    except (AttributeError, OSError) as error:
        logger.warning("the KV pool is not in memory that others can read (%s): what is sent is copied first", error)
        return None


def _require_memory(num_bytes: int) -> None:
    """Pages are taken when they are first used: what does not fit would be found out in the middle of a request."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > installed:
        raise ConfigError(
            f"the KV pool of {num_bytes} bytes is larger than this machine's memory of {installed}; "
            "lower kv_cache_memory_bytes or num_gpu_blocks_override",
            param="kv_cache_memory_bytes",
        )
