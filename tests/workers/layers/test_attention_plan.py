"""Every row of a plan sees the keys that a window allows, no others, and reads no block but its request's own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from workers.engine.scheduler import ScheduledRequest
from workers.layers.attention_plan import AttentionPlan, Planner

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def requests(rng: random.Random) -> tuple[list[ScheduledRequest], int]:
    """In the order of their rows, with the number of those that decode; tables share no block."""
    decodes = sorted(rng.randrange(120) for _ in range(rng.randrange(12)))
    chunks = [(rng.choice([0, rng.randrange(90)]), rng.randrange(2, 40)) for _ in range(rng.randrange(4))]
    shares = [(start, 1) for start in decodes] + chunks
    free = list(range(1000))
    rng.shuffle(free)
    made = []
    for start, num_tokens in shares:
        table = [free.pop() for _ in range(-(-(start + num_tokens) // BLOCK_SIZE) + rng.randrange(3))]
        made.append(ScheduledRequest("r", [7] * num_tokens, start, table))
    return made, len(decodes)


def seen(plan: AttentionPlan) -> Iterator[tuple[int, list[tuple[int, int]], set[int]]]:
    """(row, (block, offset) of each key that it sees, all blocks read)."""
    for group in plan.decodes:
        for i, own in enumerate(group.block_ids.view(group.num_requests, -1).tolist()):
            slots = [(block, offset) for block in own for offset in range(BLOCK_SIZE)]
            visible = (group.mask[i, 0, 0] == 0).tolist()
            yield group.rows.start + i, [s for s, v in zip(slots, visible, strict=True) if v], set(own)
    for chunk in plan.prefills:
        blocks = chunk.block_ids.tolist()
        slots = [(block, offset) for block in blocks for offset in range(BLOCK_SIZE)]
        for i in range(chunk.num_tokens):
            visible = [j <= i for j in range(len(slots))] if chunk.mask is None else (chunk.mask[i] == 0).tolist()
            yield chunk.rows.start + i, [s for s, v in zip(slots, visible, strict=False) if v], set(blocks)


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 17, 64])
def test_every_row_sees_its_window(window: int | None) -> None:
    rng = random.Random(window)
    for _ in range(12):
        ordered, num_decodes = requests(rng)
        plan = Planner(window, BLOCK_SIZE, torch.float32, CPU).plan(ordered, num_decodes)
        rows = list(seen(plan))
        assert [row for row, _, _ in rows] == list(range(sum(len(r.token_ids) for r in ordered)))
        owners = [(r, i) for r in ordered for i in range(len(r.token_ids))]
        for (_, keys, blocks), (request, i) in zip(rows, owners, strict=True):
            at = request.start + i
            positions = range(0 if window is None else max(0, at - window + 1), at + 1)
            assert keys == [(request.block_table[p // BLOCK_SIZE], p % BLOCK_SIZE) for p in positions]
            assert blocks <= set(request.block_table)


def test_a_window_reads_only_the_blocks_that_it_touches() -> None:
    table = list(range(100))
    decode = ScheduledRequest("r", [7], 399, table)
    (group,) = Planner(8, BLOCK_SIZE, torch.float32, CPU).plan([decode], 1).decodes
    assert group.block_ids.tolist() == [[98, 99]]
    chunk = ScheduledRequest("r", [7] * 8, 392, table)
    (prefill,) = Planner(8, BLOCK_SIZE, torch.float32, CPU).plan([chunk], 0).prefills
    assert (prefill.block_ids.tolist(), prefill.first_key) == ([96, 97, 98, 99], 96 * BLOCK_SIZE)


def test_contexts_longer_than_a_window_share_one_group() -> None:
    decodes = [ScheduledRequest("r", [7], start, list(range(100))) for start in range(200, 260)]
    assert len(Planner(14, BLOCK_SIZE, torch.float32, CPU).plan(decodes, len(decodes)).decodes) == 1
