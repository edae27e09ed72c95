"""The tensors of one step, built once and used by every layer.

Rows are tokens. Requests with one token come first, shortest context first, so that each group of similar length is a
slice of rows; then the chunks of prompts, one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workers.engine.scheduler import PromptScores, ScheduledRequest, SchedulerOutput
from workers.request import SamplingParams, TokensSoFar

# Contexts of one group are padded to a multiple of this many blocks, so that similar lengths share an attention call.
BUCKET_BLOCKS = 4
# Context tokens of one group: its gathered KV stays near the caches of a core.
GROUP_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests with one query token each, their contexts padded to num_blocks blocks."""

    rows: slice
    # [num_requests * num_blocks]: the block tables, one after another.
    block_ids: torch.Tensor
    # [num_requests, 1, 1, num_blocks * block_size]: 0 inside the context, -inf after it.
    mask: torch.Tensor

    @property
    def num_requests(self) -> int:
        return self.rows.stop - self.rows.start  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Query tokens [start, start + n) of one prompt."""

    rows: slice
    # Blocks of [0, start + n), and the causal mask [n, start + n]. None: the prompt's first chunk needs neither.
    context: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class StepBatch:
    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    slot_mapping: torch.Tensor  # [num_tokens]: block_id * block_size + offset
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]
    # Rows whose logits are wanted: first those that a token is sampled from, then those of prompt_scores.
    sample_rows: torch.Tensor
    # Of each sampled token: the index in the SchedulerOutput, params, its position, and what penalties depend on.
    sample_index: tuple[int, ...]
    sample_params: tuple[SamplingParams, ...]
    sample_positions: tuple[int, ...]
    sample_tokens: tuple[TokensSoFar | None, ...]
    # With the index in the SchedulerOutput.
    prompt_scores: tuple[tuple[int, PromptScores], ...]


def build_batch(output: SchedulerOutput, block_size: int, dtype: torch.dtype, device: torch.device) -> StepBatch:
    requests = output.requests
    order = sorted(range(len(requests)), key=lambda i: (len(requests[i].token_ids) > 1, requests[i].start))
    ordered = [requests[i] for i in order]
    num_decodes = sum(len(r.token_ids) == 1 for r in ordered)
    lengths = np.fromiter((len(r.token_ids) for r in ordered), np.int64, len(ordered))
    ends = lengths.cumsum()
    positions = _positions(ordered, lengths, ends)
    sampled = [i for i, r in enumerate(ordered) if r.params is not None]
    scored = [(i, r.prompt_scores) for i, r in enumerate(ordered) if r.prompt_scores]
    starts = ends - lengths
    scored_rows = [starts[i] + np.arange(len(scores.token_ids)) for i, scores in scored]
    return StepBatch(
        token_ids=torch.tensor([token for r in ordered for token in r.token_ids], device=device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(_slots(ordered, positions, ends, block_size)).to(device),
        decodes=tuple(
            _decode_group(ordered, rows, block_size, dtype, device)
            for rows in _groups(ordered[:num_decodes], block_size)
        ),
        prefills=tuple(
            _prefill_chunk(ordered[i], int(ends[i]), block_size, dtype, device)
            for i in range(num_decodes, len(ordered))
        ),
        sample_rows=torch.from_numpy(np.concatenate([ends[sampled] - 1, *scored_rows])).to(device),
        sample_index=tuple(order[i] for i in sampled),
        sample_params=tuple(r.params for r in ordered if r.params is not None),
        sample_positions=tuple(ordered[i].start + len(ordered[i].token_ids) for i in sampled),
        sample_tokens=tuple(ordered[i].tokens_so_far for i in sampled),
        prompt_scores=tuple((order[i], scores) for i, scores in scored),
    )


def _positions(ordered: Sequence[ScheduledRequest], lengths: np.ndarray, ends: np.ndarray) -> np.ndarray:
    starts = np.fromiter((r.start for r in ordered), np.int64, len(ordered))
    positions = np.repeat(starts - (ends - lengths), lengths)
    positions += np.arange(len(positions))
    return positions


def _slots(ordered: Sequence[ScheduledRequest], positions: np.ndarray, ends: np.ndarray, block_size: int) -> np.ndarray:
    index, offsets = np.divmod(positions, block_size)
    block_ids = np.empty_like(index)
    row = 0
    for request, end in zip(ordered, ends.tolist(), strict=True):
        if end - row == 1:
            block_ids[row] = request.block_table[index[row]]
        else:
            block_ids[row:end] = np.asarray(request.block_table)[index[row:end]]
        row = end
    return block_ids * block_size + offsets


def _num_blocks(request: ScheduledRequest, block_size: int) -> int:
    """Blocks of the context and of the step's own tokens."""
    return -(-(request.start + len(request.token_ids)) // block_size)


def _bucket(request: ScheduledRequest, block_size: int) -> int:
    return -(-_num_blocks(request, block_size) // BUCKET_BLOCKS) * BUCKET_BLOCKS


def _groups(decodes: Sequence[ScheduledRequest], block_size: int) -> Iterator[slice]:
    """Slices of `decodes` (sorted by length) that share a bucket and stay within GROUP_TOKENS."""
    start = 0
    for i in range(1, len(decodes) + 1):
        bucket = _bucket(decodes[start], block_size)
        full = (i + 1 - start) * bucket * block_size > GROUP_TOKENS
        if i == len(decodes) or full or _bucket(decodes[i], block_size) != bucket:
            yield slice(start, i)
            start = i


def _decode_group(
    ordered: Sequence[ScheduledRequest], rows: slice, block_size: int, dtype: torch.dtype, device: torch.device
) -> DecodeGroup:
    requests = ordered[rows]
    num_blocks = max(_num_blocks(r, block_size) for r in requests)
    block_ids: list[int] = []
    for request in requests:
        # Padding repeats the request's own last block, so that no row ever reads a foreign one.
        used = request.block_table[: _num_blocks(request, block_size)]
        block_ids += [*used, *[used[-1]] * (num_blocks - len(used))]
    seq_lens = torch.tensor([r.start + 1 for r in requests])
    outside = torch.arange(num_blocks * block_size) >= seq_lens[:, None]
    mask = torch.zeros(outside.shape, dtype=dtype).masked_fill_(outside, float("-inf"))
    return DecodeGroup(rows, torch.tensor(block_ids, device=device), mask[:, None, None, :].to(device))


def _prefill_chunk(
    request: ScheduledRequest, end_row: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> PrefillChunk:
    num_tokens = len(request.token_ids)
    rows = slice(end_row - num_tokens, end_row)
    if request.start == 0:
        return PrefillChunk(rows, None)
    seq_len = request.start + num_tokens
    block_ids = torch.tensor(request.block_table[: _num_blocks(request, block_size)], device=device)
    mask = torch.full((num_tokens, seq_len), float("-inf"), dtype=dtype, device=device).triu_(request.start + 1)
    return PrefillChunk(rows, (block_ids, mask))
