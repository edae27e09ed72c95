"""Decode steps as CUDA graphs: one launch instead of hundreds, for each of a few sizes of batch.

Not yet run on a GPU; what goes in and comes out is tested on a CPU with functions in the place of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from workers.engine.batch import StepBatch
from workers.layers.block_tables import BlockTables

Compute = Callable[[], torch.Tensor]
# A graph of what a function does, as a function that does the same on the same memory.
Capture = Callable[[Compute], Compute]


class DecodeGraphs:
    """Rows are padded to the next size: a padded row has no key and no slot, and its logits are dropped."""

    def __init__(
        self,
        forward: Callable[[StepBatch], torch.Tensor],
        max_rows: int,
        max_blocks: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """`max_blocks`: of one request. Captures at once, the largest size first: the smaller ones fit its memory."""
        sizes = graph_sizes(max_rows)
        self._inputs = _inputs(sizes[-1], max_blocks, device)
        self._graphs: dict[int, Compute] = {}
        for size in reversed(sizes):
            self._clear(0, size)
            step = _first_rows(self._inputs, size)
            self._graphs[size] = capture(lambda step=step: forward(step))  # type: ignore[misc]

    def run(self, step: StepBatch) -> torch.Tensor | None:
        """The logits of the step, good until the next run; None: not a step of decodes alone, or too large a one."""
        num_rows = len(step.token_ids)
        size = next((size for size in sorted(self._graphs) if size >= num_rows), None)
        if size is None or not _is_decode(step):
            return None
        self._fill(step, num_rows)
        self._clear(num_rows, size)
        return self._graphs[size]()[:num_rows]

    def _fill(self, step: StepBatch, num_rows: int) -> None:
        tables, own = step.tables, self._inputs.tables
        assert tables is not None
        assert own is not None
        self._inputs.token_ids[:num_rows].copy_(step.token_ids)
        self._inputs.positions[:num_rows].copy_(step.positions)
        self._inputs.slot_mapping[:num_rows].copy_(step.slot_mapping)
        own.seq_lens[:num_rows].copy_(tables.seq_lens)
        # A request may have blocks for tokens to come; what is left of longer tables behind these is not read.
        width = min(tables.block_ids.shape[1], own.block_ids.shape[1])
        own.block_ids[:num_rows, :width].copy_(tables.block_ids[:, :width])

    def _clear(self, start: int, end: int) -> None:
        assert self._inputs.tables is not None
        self._inputs.slot_mapping[start:end].fill_(-1)
        self._inputs.tables.seq_lens[start:end].zero_()


def graph_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 32 up to 256; max_rows the last of them where it is less."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 32)]
    largest = min(max_rows, sizes[-1])
    return [*(size for size in sizes if size < largest), largest]


def graph_capture() -> Capture:
    """Graphs that share their memory: only what the last one replayed has returned is good."""
    memory = torch.cuda.graph_pool_handle()

    def capture(compute: Compute) -> Compute:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            # Kernels are compiled, and cuBLAS chooses, outside the capture.
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Another thread may copy KV meanwhile.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            out = compute()
        return partial(_replay, graph, out)

    return capture


def _replay(graph: torch.cuda.CUDAGraph, out: torch.Tensor) -> torch.Tensor:
    graph.replay()
    return out


def _is_decode(step: StepBatch) -> bool:
    """Each row is a request's one token, and one token is sampled after each."""
    num_rows = len(step.token_ids)
    assert step.tables is not None, "a step for a GPU has block tables"
    return step.tables.num_decodes == len(step.samples) == len(step.sample_rows) == num_rows


def _inputs(num_rows: int, max_blocks: int, device: torch.device) -> StepBatch:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    tables = BlockTables(
        block_ids=zeros(num_rows, max_blocks, dtype=torch.int32),
        seq_lens=zeros(num_rows, dtype=torch.int32),
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        num_decodes=num_rows,
        tile_requests=zeros(0, dtype=torch.int32),
        tile_starts=zeros(0, dtype=torch.int32),
    )
    rows = torch.arange(num_rows, device=device)
    return StepBatch(
        token_ids=zeros(num_rows),
        positions=zeros(num_rows),
        slot_mapping=zeros(num_rows),
        plans={},
        sample_rows=rows,
        samples=(),
        sample_index=(),
        prompt_scores=(),
        tables=tables,
    )


def _first_rows(step: StepBatch, num_rows: int) -> StepBatch:
    assert step.tables is not None
    return replace(
        step,
        token_ids=step.token_ids[:num_rows],
        positions=step.positions[:num_rows],
        slot_mapping=step.slot_mapping[:num_rows],
        sample_rows=step.sample_rows[:num_rows],
        tables=replace(
            step.tables,
            block_ids=step.tables.block_ids[:num_rows],
            seq_lens=step.tables.seq_lens[:num_rows],
            query_starts=step.tables.query_starts[: num_rows + 1],
            num_decodes=num_rows,
        ),
    )
