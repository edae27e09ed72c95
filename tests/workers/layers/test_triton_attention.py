"""The GPU's attention, under Triton's interpreter: each row as naive attention over its block table, to the bit the
same whoever shares the step and however a prompt is cut."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.paged_case import PagedCase, Shape, Share, make_case, naive_attention, with_garbage_behind_tables

pytest.importorskip("triton", reason="the kernels of a GPU need Triton: pip install triton")
from workers.layers.triton_attention import TritonPagedAttention
from workers.layers.triton_decode import SPLIT_TOKENS

BF16 = torch.bfloat16
# Absolute and relative.
TOLERANCE = {torch.float32: (2e-6, 1e-6), BF16: (1e-2, 2e-2)}


def attend(case: PagedCase) -> torch.Tensor:
    shape = case.shape
    kernel = TritonPagedAttention(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, window=shape.window, softcap=shape.softcap
    )
    batch = cast(Any, SimpleNamespace(tables=case.tables, slot_mapping=case.slot_mapping))
    return kernel(case.q, case.k, case.v, case.kv_cache, batch)


def require_right(case: PagedCase) -> None:
    got, want = attend(case), naive_attention(case)
    assert got.dtype is case.shape.dtype
    atol, rtol = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_heads=2, num_kv_heads=1),
        Shape(num_heads=6, dtype=BF16),
        Shape(num_heads=2, num_kv_heads=1, head_dim=16, block_size=1),
        Shape(num_heads=2, head_dim=80, block_size=8),
        Shape(num_heads=2, head_dim=128, block_size=32, dtype=BF16),
        Shape(num_heads=2, num_kv_heads=1, head_dim=256, dtype=BF16, window=30, softcap=30.0),
        Shape(num_heads=2, window=70),
        Shape(num_heads=2, softcap=5.0),
        Shape(num_heads=2, pool_dtype=BF16),
        Shape(num_heads=2, pool_dtype=torch.uint8),
        Shape(num_heads=2, pool_dtype=torch.uint8, dtype=BF16, head_dim=128),
    ],
    ids=str,
)
def test_rows_are_as_naive_attention(shape: Shape) -> None:
    shares: list[Share] = [(0, 1), (SPLIT_TOKENS + 3, 1), (0, 5), (60, 20)]
    require_right(with_garbage_behind_tables(make_case(shape, shares)))


@pytest.mark.parametrize("start", [63, 64, SPLIT_TOKENS - 1, SPLIT_TOKENS, 2 * SPLIT_TOKENS - 1])
def test_contexts_that_end_where_tiles_do(start: int) -> None:
    require_right(make_case(Shape(num_heads=2, num_kv_heads=1, head_dim=16), [(start, 1), (start - 1, 2)]))


def test_many_splits_of_a_long_context() -> None:
    require_right(make_case(Shape(num_heads=1, num_kv_heads=1, head_dim=16, dtype=BF16), [(17 * SPLIT_TOKENS + 7, 1)]))


def test_more_heads_share_a_kv_head_than_a_tile_has_rows() -> None:
    require_right(make_case(Shape(num_heads=34, head_dim=16), [(40, 1)]))


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    case = make_case(Shape(num_heads=2, num_kv_heads=1, dtype=BF16), [(5, 1), (300, 1), (90, 1), (40, 30)])
    together, row = attend(case), 0
    for i, (_, num_tokens) in enumerate(case.shares):
        alone = attend(only(case, i, slice(row, row + num_tokens)))
        assert torch.equal(alone, together[row : row + num_tokens])
        row += num_tokens


def only(case: PagedCase, request: int, rows: slice) -> PagedCase:
    one = make_case(case.shape, [case.shares[request]])
    tables = replace(one.tables, block_ids=case.tables.block_ids[request : request + 1])
    own = {name: getattr(case, name)[rows] for name in ("q", "k", "v", "slot_mapping")}
    return replace(case, tables=tables, **own)


def test_chunks_change_no_bit() -> None:
    """The last chunk's rows are those of the whole prompt."""
    num_tokens = 140
    case = make_case(Shape(num_heads=2, num_kv_heads=1, dtype=BF16), [(0, num_tokens)])
    whole = attend(case)
    for start in (1, 101, 128):
        rows = slice(start, num_tokens)
        chunk = make_case(case.shape, [(start, num_tokens - start)])
        tables = replace(chunk.tables, block_ids=case.tables.block_ids)
        own = {name: getattr(case, name)[rows] for name in ("q", "k", "v", "slot_mapping")}
        assert torch.equal(attend(replace(case, tables=tables, **own)), whole[rows])


def test_a_row_that_pads_is_zero_and_writes_nothing() -> None:
    case = make_case(Shape(), [(20, 1), (9, 1)])
    tables = replace(case.tables, seq_lens=torch.tensor([21, 0], dtype=torch.int32))
    slots = case.slot_mapping.clone()
    slots[1] = -1
    before = case.kv_cache.clone()
    out = attend(replace(case, tables=tables, slot_mapping=slots))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    changed = (case.kv_cache != before).flatten(1, 2).any(-1).any(-1)
    assert changed.nonzero().tolist() == [[0, int(slots[0])], [1, int(slots[0])]]
