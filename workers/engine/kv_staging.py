"""KV between a GPU's pool and this process's memory, by way of pinned buffers and on a stream beside the steps'.

Not yet run on a GPU; on a CPU, where there is neither, the tests run the same copies.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from workers.errors import FrameError
from workers.kv_transfer.slots import Slots
from workers.layers.triton_kv import gather_slots, scatter_slots

if TYPE_CHECKING:
    # A GPU machine without pydantic, which the executor needs, copies KV all the same (benchmarks/gpu.py).
    from workers.engine.executor import Buffer

# While one piece crosses to or from the GPU the one before, or behind, is copied in memory.
PIECE_BYTES = 1 << 20


class KVStaging:
    """One copy at a time; each is done when its call returns."""

    def __init__(self, pool: torch.Tensor) -> None:
        """`pool`: [num_layers, 2, num_blocks, block_size, num_kv_heads, pool_width]."""
        self._pool = pool
        on_gpu = pool.device.type == "cuda"
        self._stream = torch.cuda.Stream(pool.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._room = _make_room(0, pool.device)
        self._lock = threading.Lock()

    @torch.inference_mode()
    def read(self, slots: Slots, layers: slice, room: memoryview, after: torch.cuda.Event | None = None) -> None:
        """Copy to `room`, which has the size: [layers, 2, len(slots), num_kv_heads, head_bytes]. `after`: when the KV
        is there. FrameError when it has another size."""
        self._require_size(memoryview(room).nbytes, slots, layers)
        out = np.frombuffer(room, np.uint8)
        with self._lock, self._beside(after):
            staged = self._stage(len(out))
            gather_slots(self._pool[layers], self._index(slots), self._packed(staged.on_device, slots))
            done = []
            for piece in _pieces(len(out)):
                staged.on_host[piece].copy_(staged.on_device[piece], non_blocking=True)
                done.append(self._mark())
            for piece, event in zip(_pieces(len(out)), done, strict=True):
                if event is not None:
                    event.synchronize()
                out[piece] = staged.on_host[piece].numpy()

    @torch.inference_mode()
    def write(self, slots: Slots, layers: slice, payload: Buffer, after: torch.cuda.Event | None = None) -> None:
        """Put what `read` gave elsewhere into `slots`. `after`: when nothing else is written there any more.
        FrameError when its size is another one."""
        self._require_size(memoryview(payload).nbytes, slots, layers)
        given = np.frombuffer(payload, np.uint8)
        with self._lock, self._beside(after):
            staged = self._stage(len(given))
            for piece in _pieces(len(given)):
                staged.on_host[piece].numpy()[:] = given[piece]
                staged.on_device[piece].copy_(staged.on_host[piece], non_blocking=True)
            scatter_slots(self._pool[layers], self._index(slots), self._packed(staged.on_device, slots))
            if self._stream is not None:
                self._stream.synchronize()

    def _require_size(self, num_bytes: int, slots: Slots, layers: slice) -> None:
        wanted = self._pool[layers, :, 0, 0].nbytes * len(slots)
        if num_bytes != wanted:
            raise FrameError(f"KV of {len(slots)} tokens is {wanted} bytes, not {num_bytes}")

    def _stage(self, num_bytes: int) -> _Room:
        if len(self._room.on_host) < num_bytes:
            self._room = _make_room(num_bytes, self._pool.device)
        return _Room(self._room.on_device[:num_bytes], self._room.on_host[:num_bytes])

    def _packed(self, staged: torch.Tensor, slots: Slots) -> torch.Tensor:
        return staged.view(self._pool.dtype).view(-1, 2, len(slots), *self._pool.shape[4:])

    def _index(self, slots: Slots) -> torch.Tensor:
        return torch.from_numpy(np.array(slots, np.int64)).to(self._pool.device)

    @contextlib.contextmanager
    def _beside(self, after: torch.cuda.Event | None) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield

    def _mark(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class _Room(NamedTuple):
    """The same bytes twice."""

    on_device: torch.Tensor
    on_host: torch.Tensor


def _make_room(num_bytes: int, device: torch.device) -> _Room:
    pinned = device.type == "cuda"
    return _Room(
        torch.empty(num_bytes, dtype=torch.uint8, device=device),
        torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned),
    )


def _pieces(num_bytes: int) -> Iterator[slice]:
    for start in range(0, num_bytes, PIECE_BYTES):
        yield slice(start, min(start + PIECE_BYTES, num_bytes))
