"""Decode steps out of padded buffers, with functions in the place of graphs: the logits of a CPU's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_folder
from tests.workers.models.paged import BLOCK_SIZE, CPU, GREEDY, Paged, prompt
from tests.workers.scheduled import scheduled
from workers.engine.batch import StepBatch, build_batch
from workers.engine.cuda_graphs import DecodeGraphs, graph_sizes
from workers.engine.scheduler import ScheduledRequest, SchedulerOutput
from workers.layers.block_tables import block_tables

pytest.importorskip("triton", reason="the kernels of a GPU need Triton: pip install triton")
from workers.layers.triton_attention import TritonPagedAttention

MAX_BLOCKS = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


@pytest.fixture
def on_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Paged:
    """The model with a GPU's kernels."""
    with monkeypatch.context() as patch:
        patch.setattr("workers.models.decoder.attention_kernel", lambda device: TritonPagedAttention)
        return Paged(folder)


def gpu_step(requests: Sequence[ScheduledRequest]) -> StepBatch:
    """As build_batch makes it for a GPU."""
    output = SchedulerOutput(tuple(requests), sum(len(r.token_ids) for r in requests))
    step = build_batch(output, BLOCK_SIZE, torch.float32, CPU)
    ordered = sorted(requests, key=lambda r: (len(r.token_ids) > 1, r.start))
    num_decodes = sum(len(r.token_ids) == 1 for r in requests)
    return replace(step, plans={}, tables=block_tables(ordered, num_decodes, CPU))


def filled(model: Paged, lengths: Sequence[int]) -> list[ScheduledRequest]:
    """Prompts in the pool, and the step after each: one token more."""
    tables = [model.table(length + 1) for length in lengths]
    for i, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        model.step(scheduled("r", prompt(length, i), 0, table, GREEDY))
    return [scheduled("r", [7 + i], n, t, GREEDY) for i, (n, t) in enumerate(zip(lengths, tables, strict=True))]


def test_a_graph_gives_what_attention_on_a_cpu_gives(folder: Path, on_gpu: Paged) -> None:
    on_cpu = Paged(folder)
    requests = filled(on_cpu, [40, 5, 17])
    on_gpu.kv_cache.copy_(on_cpu.kv_cache)
    want = on_cpu.step(*requests)
    computed: list[int] = []

    def forward(step: StepBatch) -> torch.Tensor:
        computed.append(len(step.token_ids))
        return on_gpu.model.forward(step, on_gpu.kv_cache)

    with torch.inference_mode():
        graphs = DecodeGraphs(forward, 4, MAX_BLOCKS, CPU, lambda compute: compute)
        for shares in (requests, requests[1:2]):
            step = gpu_step(shares)
            got = graphs.run(step)
            assert got is not None
            rows = {id(shares[i]): row for i, row in zip(step.sample_index, got, strict=True)}
            for share in shares:
                torch.testing.assert_close(rows[id(share)], want[requests.index(share)], atol=1e-4, rtol=1e-4)
    assert computed == [4, 1]
    # What padded rows computed is nowhere: the pools are the same, the garbage of their free blocks too.
    torch.testing.assert_close(on_gpu.kv_cache, on_cpu.kv_cache, atol=1e-4, rtol=1e-4)


def test_rows_of_the_last_step_write_no_more(on_gpu: Paged) -> None:
    """Their blocks may be another's by now."""
    requests = [scheduled("r", [7 + i], 20, on_gpu.table(21), GREEDY) for i in range(4)]
    with torch.inference_mode():
        forward = partial(on_gpu.model.forward, kv_cache=on_gpu.kv_cache)
        graphs = DecodeGraphs(forward, 4, MAX_BLOCKS, CPU, lambda compute: compute)
        graphs.run(gpu_step(requests))
        theirs = on_gpu.kv_cache[:, :, requests[3].block_table[1]]
        theirs.fill_(5.0)
        graphs.run(gpu_step(requests[:3]))
    assert torch.equal(theirs, torch.full_like(theirs, 5.0))


def test_other_steps_have_no_graph(on_gpu: Paged) -> None:
    with torch.inference_mode():
        graphs = DecodeGraphs(lambda step: torch.zeros(len(step.token_ids), 1), 2, MAX_BLOCKS, CPU, lambda c: c)
        decode = scheduled("r", [7], 5, [3], GREEDY)
        assert graphs.run(gpu_step([decode, decode])) is not None
        assert graphs.run(gpu_step([decode] * 3)) is None
        assert graphs.run(gpu_step([decode, scheduled("r", [7, 8], 0, [4], GREEDY)])) is None
        # The one token of a prompt's chunk: nothing is sampled.
        assert graphs.run(gpu_step([scheduled("r", [7], 5, [3])])) is None


def test_a_model_watched_tells_of_its_layers_in_order(on_gpu: Paged) -> None:
    told: list[int] = []
    on_gpu.model.watch(told.append)
    with torch.inference_mode():
        on_gpu.model.forward(gpu_step([scheduled("r", [7, 8], 0, [4], GREEDY)]), on_gpu.kv_cache)
    assert told == list(range(on_gpu.config.num_layers))


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 64, 100, 256, 1000])
def test_sizes_of_graphs_waste_under_half(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert sizes[-1] == min(max_rows, 256)
    assert sizes == sorted(set(sizes))
    for num_rows in range(1, sizes[-1] + 1):
        assert next(size for size in sizes if size >= num_rows) < 2 * num_rows or num_rows == 1
