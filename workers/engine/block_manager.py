"""Who may use which block of the KV pool. Takes counts and hashes, returns ids; knows nothing of requests.

A block is free (nothing of worth in it), referenced by `ref_count` owners, or cached: no owner, but its KV is known by
a hash and may be found again until the block is needed (least recently used first).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from workers.errors import OverloadedError


class BlockManager:
    """Blocks [0, num_blocks) of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Oldest freed first: a stray late write hits a block that nobody has taken again for as long as possible.
        self._free: deque[int] = deque(range(num_blocks))
        self._ref_counts: dict[int, int] = {}
        # Every block whose KV is known, owned or not, by the hash of its tokens and all before them.
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        # Blocks without owner that _by_hash still finds, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Told of each hash that is found from now on (True), or no more.
        self.on_known: Callable[[bytes, bool], None] = lambda block_hash, known: None

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of worth."""
        return len(self._free)

    @property
    def free_block_ids(self) -> list[int]:
        return list(self._free)

    @property
    def cached_block_ids(self) -> list[int]:
        return list(self._cached)

    @property
    def known_hashes(self) -> list[bytes]:
        """All that `find` finds, in the order in which they came."""
        return list(self._by_hash)

    @property
    def num_cached(self) -> int:
        """Blocks that hold known KV and can be taken."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def blocks_for_choices(self, num_tokens: int, num_choices: int) -> int:
        """With room for one token more, and a block more for every further choice."""
        return self.blocks_for(num_tokens + 1) + num_choices - 1

    def can_allocate(self, num_blocks: int, watermark: int = 0, keeping: Sequence[int] = ()) -> bool:
        """Whether `num_blocks` can be taken, leaving `watermark` of them and the cached ones among `keeping`."""
        kept = sum(block_id in self._cached for block_id in keeping)
        return num_blocks + watermark <= len(self._free) + len(self._cached) - kept

    def num_owned_only_by(self, owned: Iterable[int]) -> int:
        """Blocks that have no other owners than those of `owned`, where each block is once for each of them."""
        return sum(self._ref_counts[block_id] == count for block_id, count in Counter(owned).items())

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` ids. Raises OverloadedError, taking none, when there are not as many."""
        if not self.can_allocate(num_blocks):
            raise OverloadedError(
                f"{num_blocks} KV blocks wanted, {self.num_free + self.num_cached} of {self.num_blocks} can be taken"
            )
        taken = [self._free.popleft() if self._free else self._evict() for _ in range(num_blocks)]
        self._ref_counts.update(dict.fromkeys(taken, 1))
        return taken

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks that hold the KV of the longest known prefix. Takes nothing."""
        found = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def share(self, block_ids: Iterable[int]) -> None:
        """One more owner for blocks that `find` gave."""
        for block_id in block_ids:
            self._cached.pop(block_id, None)
            self._ref_counts[block_id] = self._ref_counts.get(block_id, 0) + 1

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """The KV in an owned block is whole and verified: others may share it. The first block of a hash stays."""
        assert block_id in self._ref_counts, f"block {block_id} has no owner"
        if block_hash not in self._by_hash and block_id not in self._hash_of:
            self._by_hash[block_hash] = block_id
            self._hash_of[block_id] = block_hash
            self.on_known(block_hash, True)

    def free(self, block_ids: Sequence[int]) -> None:
        """One owner less. The last blocks of a table go first when room is needed: a prefix is of use without them."""
        for block_id in reversed(block_ids):
            assert self._ref_counts.get(block_id, 0) > 0, f"block {block_id} freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id]:
                continue
            del self._ref_counts[block_id]
            if block_id in self._hash_of:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless `owned`, each block once for each owner, is exactly what is referenced."""
        counts = Counter(owned)
        refs = Counter(self._ref_counts)
        assert not refs - counts, f"leaked blocks {sorted(refs - counts)}"
        assert set(counts) <= set(refs), f"blocks owned but not allocated {sorted(set(counts) - set(refs))}"
        assert not counts - refs, f"blocks with more owners than are counted (two owners): {sorted(counts - refs)}"
        assert not set(self._free) & (set(counts) | set(self._cached)), "a free block is owned or cached"
        assert not set(counts) & set(self._cached), "a cached block is owned"
        assert len(self._free) + len(self._cached) + len(counts) == self.num_blocks, "blocks are missing"
        assert {h: b for b, h in self._hash_of.items()} == self._by_hash, "hashes and blocks disagree"
        assert set(self._cached) <= set(self._hash_of), "a cached block cannot be found"

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of.pop(block_id)
        del self._by_hash[block_hash]
        self.on_known(block_hash, False)
        return block_id
