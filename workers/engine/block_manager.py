"""Who may use which block of the KV pool. Takes counts, returns ids; knows nothing of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from workers.errors import OverloadedError


class BlockManager:
    """Free list over blocks [0, num_blocks) of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Oldest freed first: a stray late write hits a block that nobody has taken again for as long as possible.
        self._free: deque[int] = deque(range(num_blocks))
        self._allocated: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int, watermark: int = 0) -> bool:
        """Whether `num_blocks` are free, leaving `watermark` of them."""
        return num_blocks + watermark <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` ids. Raises OverloadedError, taking none, when there are not as many."""
        if not self.can_allocate(num_blocks):
            raise OverloadedError(f"{num_blocks} KV blocks wanted, {len(self._free)} of {self.num_blocks} free")
        taken = [self._free.popleft() for _ in range(num_blocks)]
        self._allocated.update(taken)
        return taken

    def free(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            assert block_id in self._allocated, f"block {block_id} freed twice"
            self._allocated.remove(block_id)
            self._free.append(block_id)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless `owned` is exactly what is allocated, each block once."""
        owned = list(owned)
        assert len(owned) == len(set(owned)), f"a block has two owners: {sorted(owned)}"
        leaked, foreign = self._allocated - set(owned), set(owned) - self._allocated
        assert not leaked, f"leaked blocks {sorted(leaked)}"
        assert not foreign, f"blocks owned but not allocated {sorted(foreign)}"
        assert len(self._allocated) + len(self._free) == self.num_blocks
