"""Where the keys and queries of a step lie, as tensors that a GPU kernel reads: in the place of plans with masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    # A GPU machine without pydantic, which the scheduler needs, runs the kernels all the same (benchmarks/gpu.py).
    from workers.engine.scheduler import ScheduledRequest

# Query tokens of a prompt that are dealt to a kernel's programs together.
QUERY_TILE = 128


@dataclass(frozen=True, slots=True)
class BlockTables:
    """One row for each request, in the order of the step's rows; all int32 and on the step's device."""

    # [num_requests, width]; what lies behind a request's own blocks is not read.
    block_ids: torch.Tensor
    # [num_requests]: keys that the last query of each sees, itself included; 0: a row that only pads.
    seq_lens: torch.Tensor
    # [num_requests + 1]: the first query row of each.
    query_starts: torch.Tensor
    # Requests with one query each; they come first.
    num_decodes: int
    # [num_tiles]: request, and first query in it, of every QUERY_TILE queries of a prompt.
    tile_requests: torch.Tensor
    tile_starts: torch.Tensor


def block_tables(ordered: Sequence[ScheduledRequest], num_decodes: int, device: torch.device) -> BlockTables:
    """`ordered` are the requests in the order of their rows; the first num_decodes have one token each."""
    lengths = [len(r.token_ids) for r in ordered]
    block_ids = np.zeros((len(ordered), max((len(r.block_table) for r in ordered), default=0)), np.int32)
    for row, request in zip(block_ids, ordered, strict=True):
        row[: len(request.block_table)] = request.block_table
    tiles = [
        (i, start)
        for i, length in enumerate(lengths[num_decodes:], num_decodes)
        for start in range(0, length, QUERY_TILE)
    ]
    return BlockTables(
        torch.from_numpy(block_ids).to(device),
        _int32([r.start + length for r, length in zip(ordered, lengths, strict=True)], device),
        _int32([0, *np.cumsum(lengths, dtype=np.int32)], device),
        num_decodes,
        _int32([i for i, _ in tiles], device),
        _int32([start for _, start in tiles], device),
    )


def _int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int32)).to(device)
