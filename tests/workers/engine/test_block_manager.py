"""The block manager against a model that is a plain set."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from workers.engine.block_manager import BlockManager
from workers.errors import OverloadedError

NUM_BLOCKS = 8


class BlockManagerMachine(RuleBasedStateMachine):
    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, block_size=4)
        self.free = set(range(NUM_BLOCKS))
        self.owned: list[list[int]] = []

    @rule(target=taken, count=st.integers(0, NUM_BLOCKS + 2), watermark=st.integers(0, 3))
    def allocate(self, count: int, watermark: int) -> list[int]:
        assert self.manager.can_allocate(count, watermark) == (count + watermark <= len(self.free))
        if count > len(self.free):
            with pytest.raises(OverloadedError):
                self.manager.allocate(count)
            return []
        blocks = self.manager.allocate(count)
        assert len(blocks) == count
        assert set(blocks) <= self.free
        self.free -= set(blocks)
        self.owned.append(blocks)
        return blocks

    @rule(blocks=consumes(taken))
    def give_back(self, blocks: list[int]) -> None:
        if blocks in self.owned:
            self.owned.remove(blocks)
            self.manager.free(blocks)
            self.free |= set(blocks)

    @rule(blocks=taken)
    def nobody_frees_a_block_twice(self, blocks: list[int]) -> None:
        if gone := [b for b in blocks if b in self.free]:
            with pytest.raises(AssertionError, match="freed twice"):
                self.manager.free(gone[:1])

    @invariant()
    def the_books_agree(self) -> None:
        assert self.manager.num_free == len(self.free)
        self.manager.check_integrity(b for blocks in self.owned for b in blocks)


BlockManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_block_manager_agrees_with_a_set = BlockManagerMachine.TestCase


def test_blocks_come_back_last_that_were_freed_last():
    manager = BlockManager(4, block_size=4)
    first, second = manager.allocate(1), manager.allocate(1)
    manager.free(second)
    manager.free(first)
    assert manager.allocate(4)[-2:] == [*second, *first]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_block_holds_block_size_tokens(num_tokens, num_blocks):
    assert BlockManager(4, block_size=4).blocks_for(num_tokens) == num_blocks


def test_the_check_of_the_books_finds_leaks_thefts_and_double_owners():
    manager = BlockManager(4, block_size=4)
    blocks = manager.allocate(2)
    manager.check_integrity(blocks)
    for owned, fault in ((blocks[:1], "leaked"), ([*blocks, 3], "not allocated"), ([*blocks, blocks[0]], "two owners")):
        with pytest.raises(AssertionError, match=fault):
            manager.check_integrity(owned)
