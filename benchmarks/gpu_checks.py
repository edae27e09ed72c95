"""Whether the kernels of this GPU are right: against attention written out in fp64, and against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.gpu_model import BLOCK_SIZE, RandomModel
from tests.paged_case import PagedCase, Shape, make_case, naive_attention, with_garbage_behind_tables
from workers.engine.cuda_graphs import Capture, DecodeGraphs
from workers.engine.kv_staging import KVStaging
from workers.layers.triton_attention import TritonPagedAttention

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.uint8
SHAPES = [
    Shape(32, 8, 128, dtype=BF16),
    Shape(32, 8, 128, dtype=FP32),
    Shape(32, 8, 128, dtype=BF16, pool_dtype=FP8),
    Shape(9, 3, 64, dtype=BF16),
    Shape(32, 8, 80, block_size=8, dtype=BF16),
    Shape(16, 1, 64, block_size=1, dtype=FP32),
    Shape(8, 4, 256, block_size=32, dtype=BF16, window=300, softcap=50.0),
]
SHARES = [(0, 1), (1, 1), (255, 1), (256, 1), (1023, 1), (5000, 1), (0, 2), (0, 129), (100, 300), (2000, 200)]
TINY_SHAPES = [Shape(2, 1, 16, dtype=FP32), Shape(2, 1, 16, dtype=BF16, pool_dtype=FP8, window=9)]
TINY_SHARES = [(0, 1), (40, 1), (3, 5)]
# Of the largest number of a row's result: what rounding q, weights and result to the dtype may cost.
TOLERANCE = {FP32: 2e-5, BF16: 2e-2}

Check = dict[str, object]


def attend(case: PagedCase) -> torch.Tensor:
    shape = case.shape
    kernel = TritonPagedAttention(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, window=shape.window, softcap=shape.softcap
    )
    batch = cast(Any, SimpleNamespace(tables=case.tables, slot_mapping=case.slot_mapping))
    return kernel(case.q, case.k, case.v, case.kv_cache, batch)


def kernel_checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    shares = TINY_SHARES if tiny else SHARES
    for shape in TINY_SHAPES if tiny else SHAPES:
        if device.type == "cuda" and shape.pool_dtype is FP8 and torch.cuda.get_device_capability() < (8, 9):
            continue
        case = with_garbage_behind_tables(make_case(shape, shares, str(device)))
        got, want = attend(case), naive_attention(case)
        error = ((got.double() - want).abs().amax(-1) / want.abs().amax(-1)).max().item()
        again, alone = torch.equal(got, attend(case)), torch.equal(got[:1], attend(_first(case)))
        ok = error < TOLERANCE[shape.dtype] and again and alone
        yield {"check": str(shape), "error": error, "repeatable": again, "same_alone": alone, "ok": ok}


def _first(case: PagedCase) -> PagedCase:
    """Its first request alone, which has one query."""
    tables = replace(
        case.tables,
        block_ids=case.tables.block_ids[:1],
        seq_lens=case.tables.seq_lens[:1],
        query_starts=case.tables.query_starts[:2],
        num_decodes=1,
        tile_requests=case.tables.tile_requests[:0],
        tile_starts=case.tables.tile_starts[:0],
    )
    own = {name: getattr(case, name)[:1] for name in ("q", "k", "v", "slot_mapping")}
    return replace(case, tables=tables, **own)


def graph_check(model: RandomModel, capture: Capture, max_context: int) -> Check:
    """A padded step out of a graph against the same step launched kernel by kernel."""
    graphs = DecodeGraphs(model.forward, 4, -(-(max_context + 1) // BLOCK_SIZE), model.device, capture)
    error = 0.0
    for num_requests in (3, 1, 2):
        step = model.step([(max_context // (i + 1), 1) for i in range(num_requests)])
        want = model.forward(step)
        got = graphs.run(step)
        assert got is not None, "a step of decodes alone has a graph"
        # Products of other numbers of rows are other kernels of cuBLAS: rounding differs.
        error = max(error, ((got - want).abs().max() / want.abs().max()).item())
    return {"check": "graphs", "error": error, "ok": error < 5e-2}


def staging_check(pool: torch.Tensor, num_slots: int) -> Check:
    """KV out of the pool and into other slots of it, by way of host memory."""
    staging = KVStaging(pool)
    slots = torch.randperm(pool.shape[2] * pool.shape[3], generator=torch.Generator().manual_seed(2))
    source, target = slots[:num_slots].numpy(), slots[num_slots : 2 * num_slots].numpy()
    room = bytearray(pool[:, :, 0, 0].nbytes * num_slots)
    layers = slice(0, pool.shape[0])
    staging.read(source, layers, memoryview(room))
    staging.write(target, layers, room)
    by_slot = pool.flatten(2, 3)
    here = slots.to(pool.device)
    same = torch.equal(by_slot[:, :, here[:num_slots]], by_slot[:, :, here[num_slots : 2 * num_slots]])
    return {"check": "staging", "bytes": len(room), "ok": same}
