"""The tensors of one step, built once and used by every layer.

Rows are tokens. Requests with one token come first, shortest context first; then the chunks of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from workers.layers.attention_plan import AttentionPlan, Planner
from workers.layers.block_tables import BlockTables, block_tables

if TYPE_CHECKING:
    # A GPU machine without pydantic, which the scheduler needs, runs the model all the same (benchmarks/gpu.py).
    from workers.engine.scheduler import PromptScores, ScheduledRequest, SchedulerOutput
    from workers.request import NextToken


@dataclass(frozen=True, slots=True)
class StepBatch:
    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    slot_mapping: torch.Tensor  # [num_tokens]: block_id * block_size + offset
    # By the window of the layers that follow it; none for a GPU, which has `tables` instead.
    plans: Mapping[int | None, AttentionPlan]
    # Rows whose logits are wanted: first those that a token is sampled from, then those of prompt_scores.
    sample_rows: torch.Tensor
    # The tokens to sample, and the index in the SchedulerOutput of whose each is.
    samples: tuple[NextToken, ...]
    sample_index: tuple[int, ...]
    # With the index in the SchedulerOutput.
    prompt_scores: tuple[tuple[int, PromptScores], ...]
    tables: BlockTables | None = None


def build_batch(
    output: SchedulerOutput,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    windows: Iterable[int | None] = (None,),
    grouped: bool = True,
) -> StepBatch:
    """`windows`: of the model's layers; `grouped`: as Planner's."""
    requests = output.requests
    order = sorted(range(len(requests)), key=lambda i: (len(requests[i].token_ids) > 1, requests[i].start))
    ordered = [requests[i] for i in order]
    num_decodes = sum(len(r.token_ids) == 1 for r in ordered)
    lengths = np.fromiter((len(r.token_ids) for r in ordered), np.int64, len(ordered))
    ends = lengths.cumsum()
    positions = _positions(ordered, lengths, ends)
    scored = [(i, r.prompt_scores) for i, r in enumerate(ordered) if r.prompt_scores]
    starts = ends - lengths
    sampled = [(i, sample) for i, r in enumerate(ordered) for sample in r.samples]
    # What follows a row is at the position after it.
    sampled_rows = np.array([starts[i] + sample.position - 1 - ordered[i].start for i, sample in sampled], np.int64)
    scored_rows = [starts[i] + np.arange(len(scores.token_ids)) for i, scores in scored]
    return StepBatch(
        token_ids=torch.tensor([token for r in ordered for token in r.token_ids], device=device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(_slots(ordered, positions, ends, block_size)).to(device),
        plans={
            window: Planner(window, block_size, dtype, device, grouped=grouped).plan(ordered, num_decodes)
            for window in (set(windows) if device.type == "cpu" else ())
        },
        sample_rows=torch.from_numpy(np.concatenate([sampled_rows, *scored_rows])).to(device),
        samples=tuple(sample for _, sample in sampled),
        sample_index=tuple(order[i] for i, _ in sampled),
        prompt_scores=tuple((order[i], scores) for i, scores in scored),
        tables=None if device.type == "cpu" else block_tables(ordered, num_decodes, device),
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
