"""Which keys each row of a step attends to: built once, used by every layer that looks back equally far.

Rows of requests with one token come first, shortest context first, so that each group of similar length is a slice of
rows; then the chunks of prompts, one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    # A GPU machine without pydantic, which the scheduler needs, runs the model all the same (benchmarks/gpu.py).
    from workers.engine.scheduler import ScheduledRequest

# Contexts of one group are padded to a multiple of this many blocks, so that similar lengths share an attention call.
BUCKET_BLOCKS = 4
# Context tokens of one group: its gathered KV stays near the caches of a core.
GROUP_TOKENS = 4096


@dataclass(frozen=True)
class DecodeGroup:
    """Requests with one query token each; the blocks each can see, padded to one number of them."""

    rows: slice
    # [num_requests, num_blocks]: parts of the block tables.
    block_ids: torch.Tensor
    # [num_requests, 2]: the keys that a row sees are those from the first to before the second, counted from the first
    # of its blocks.
    visible: torch.Tensor
    block_size: int
    dtype: torch.dtype

    @property
    def num_requests(self) -> int:
        return self.rows.stop - self.rows.start  # type: ignore[no-any-return]

    @cached_property
    def mask(self) -> torch.Tensor:
        """[num_requests, 1, 1, num_blocks * block_size]: 0 for keys that the row sees, -inf for others."""
        keys = torch.arange(self.block_ids.shape[1] * self.block_size, device=self.visible.device)
        hidden = (keys < self.visible[:, :1]) | (keys >= self.visible[:, 1:])
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]


@dataclass(frozen=True)
class PrefillChunk:
    """Query tokens [start, start + n) of one prompt."""

    rows: slice
    start: int
    # [num_blocks]: those that hold keys which a row sees.
    block_ids: torch.Tensor
    # That the first of the blocks begins with.
    first_key: int
    window: int | None
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        return self.rows.stop - self.rows.start  # type: ignore[no-any-return]

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """[n, keys from first_key on]: 0 for those that a row sees, -inf for others. None: row i sees keys [0, i]."""
        if self.start == 0 and (self.window is None or self.num_tokens <= self.window):
            return None
        offset = self.start - self.first_key
        shape = (self.num_tokens, offset + self.num_tokens)
        mask = torch.full(shape, float("-inf"), dtype=self.dtype, device=self.block_ids.device).triu_(offset + 1)
        if self.window is not None:
            mask += torch.full_like(mask, float("-inf")).tril_(offset - self.window)
        return mask


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]


class Planner:
    """Plans for layers that see the last `window` tokens, their own included; None: all."""

    def __init__(
        self, window: int | None, block_size: int, dtype: torch.dtype, device: torch.device, *, grouped: bool = True
    ) -> None:
        """`grouped`: whether decodes of different lengths are different groups, for kernels that pad them."""
        self._grouped = grouped
        self._window = window
        self._block_size = block_size
        self._dtype = dtype
        self._device = device

    def plan(self, ordered: Sequence[ScheduledRequest], num_decodes: int) -> AttentionPlan:
        """`ordered` are the requests in the order of their rows; the first num_decodes have one token each."""
        decodes = tuple(self._decode_group(ordered, rows) for rows in self._groups(ordered[:num_decodes]))
        prefills = []
        row = num_decodes
        for request in ordered[num_decodes:]:
            prefills.append(self._prefill_chunk(request, row))
            row += len(request.token_ids)
        return AttentionPlan(decodes, tuple(prefills))

    def _first_block(self, request: ScheduledRequest) -> int:
        """The first that holds a key which the request's first token sees."""
        return 0 if self._window is None else max(0, request.start - self._window + 1) // self._block_size

    def _end_block(self, request: ScheduledRequest) -> int:
        return -(-(request.start + len(request.token_ids)) // self._block_size)

    def _bucket(self, request: ScheduledRequest) -> int:
        """Never fewer for a longer context: however a window lies over its blocks, it counts as touching the most."""
        num_blocks = self._end_block(request)
        if self._window is not None:
            num_blocks = min(num_blocks, -(-(self._window - 1) // self._block_size) + 1)
        return -(-num_blocks // BUCKET_BLOCKS) * BUCKET_BLOCKS

    def _groups(self, decodes: Sequence[ScheduledRequest]) -> Iterator[slice]:
        """Slices of `decodes` (sorted by length) that share a bucket and stay within GROUP_TOKENS; or all."""
        start = 0
        if decodes and not self._grouped:
            yield slice(0, len(decodes))
            return
        for i in range(1, len(decodes) + 1):
            bucket = self._bucket(decodes[start])
            full = (i + 1 - start) * bucket * self._block_size > GROUP_TOKENS
            if i == len(decodes) or full or self._bucket(decodes[i]) != bucket:
                yield slice(start, i)
                start = i

    def _decode_group(self, ordered: Sequence[ScheduledRequest], rows: slice) -> DecodeGroup:
        requests = ordered[rows]
        tables = [r.block_table[self._first_block(r) : self._end_block(r)] for r in requests]
        block_ids = np.empty((len(requests), max(map(len, tables))), np.int64)
        for own, table in zip(block_ids, tables, strict=True):
            own[: len(table)] = table
            # So that no row ever reads a foreign block.
            own[len(table) :] = table[-1]
        visible = np.array([self._visible(r) for r in requests], np.int64)
        return DecodeGroup(rows, self._tensor(block_ids), self._tensor(visible), self._block_size, self._dtype)

    def _visible(self, request: ScheduledRequest) -> tuple[int, int]:
        """The keys that its first token sees, counted from its first block."""
        end = request.start + 1
        first = 0 if self._window is None else max(0, end - self._window)
        skipped = self._first_block(request) * self._block_size
        return first - skipped, end - skipped

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device)

    def _prefill_chunk(self, request: ScheduledRequest, row: int) -> PrefillChunk:
        first = self._first_block(request)
        block_ids = torch.tensor(request.block_table[first : self._end_block(request)], device=self._device)
        rows = slice(row, row + len(request.token_ids))
        return PrefillChunk(rows, request.start, block_ids, first * self._block_size, self._window, self._dtype)
