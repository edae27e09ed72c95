"""A second account of the KV pool, kept the slow and plain way: who owns each block, and what lies in each slot.

It watches a BlockManager and a PrefixCache call by call and raises AssertionError where they differ from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from workers.engine.block_manager import BlockManager
from workers.engine.prefix_cache import PrefixCache
from workers.request import Request

# All that the KV of a token depends on: the salt, and the tokens up to its own.
Slot = tuple[str, tuple[int, ...]]


def slots_of(request: Request, start: int, end: int, drafts: Sequence[int] = ()) -> list[Slot]:
    """What belongs at positions [start, end), if `drafts` come after the request's tokens."""
    tokens = (*request.prompt_token_ids, *request.output_token_ids, *drafts)
    return [(request.cache_salt, tokens[: i + 1]) for i in range(start, end)]


class KVBook:
    def __init__(self, blocks: BlockManager, prefix_cache: PrefixCache) -> None:
        self.block_size = blocks.block_size
        self._real = blocks
        self.free = list(range(blocks.num_blocks))
        # Least recently used first.
        self.cached: list[int] = []
        self.owners: Counter[int] = Counter()
        self.kv: dict[int, list[Slot | None]] = {}
        # During a step: owners of a block that only wait to copy it.
        self.num_copiers: Counter[int] = Counter()
        # Whole blocks that may be found, by their last slot.
        self.known: dict[Slot, int] = {}
        self.ever_known: set[Slot] = set()
        self.num_hits = self.num_evictions = 0
        self._allocate, self._share, self._publish, self._free = (
            blocks.allocate, blocks.share, blocks.publish, blocks.free,
        )  # fmt: skip
        self._find = prefix_cache.find
        for name in ("allocate", "share", "publish", "free"):
            setattr(blocks, name, getattr(self, f"on_{name}"))
        prefix_cache.find = self.on_find  # type: ignore[method-assign]

    def on_allocate(self, num_blocks: int) -> list[int]:
        taken = self._allocate(num_blocks)
        assert taken == [self._next() for _ in taken], "not the oldest free blocks, then the least recently used"
        assert len(taken) == num_blocks
        return taken

    def on_share(self, block_ids: Iterable[int]) -> None:
        shared = list(block_ids)
        self._share(shared)
        for block_id in shared:
            assert self.owners[block_id] or block_id in self.known.values()
            if not self.owners[block_id]:
                self.cached.remove(block_id)
            self.owners[block_id] += 1
        self.num_hits += len(shared)

    def on_publish(self, block_id: int, block_hash: bytes) -> None:
        self._publish(block_id, block_hash)
        last = self.kv[block_id][-1]
        assert last is not None, f"block {block_id} is published before it is whole"
        salt, tokens = last
        first = len(tokens) - self.block_size
        assert self.kv[block_id] == [(salt, tokens[: i + 1]) for i in range(first, len(tokens))]
        if last not in self.known and block_id not in self.known.values():
            self.known[last] = block_id
            self.ever_known.add(last)

    def on_free(self, block_ids: Sequence[int]) -> None:
        self._free(block_ids)
        for block_id in reversed(block_ids):
            assert self.owners[block_id] > 0, f"block {block_id} is freed twice"
            self.owners[block_id] -= 1
            if not self.owners[block_id]:
                (self.cached if block_id in self.known.values() else self.free).append(block_id)

    def on_find(self, request: Request, num_tokens: int) -> list[int]:
        found = self._find(request, num_tokens)
        wanted = []
        for slot in slots_of(request, 0, num_tokens)[self.block_size - 1 :: self.block_size]:
            if slot not in self.known:
                break
            wanted.append(self.known[slot])
        assert found == wanted, "not the longest known prefix"
        return found

    def copy(self, source: int, target: int) -> None:
        assert self.owners[source], f"block {source} is copied and may be anybody's"
        self._require_writable(target)
        self.kv[target] = list(self.kv[source])

    def write(self, block_table: Sequence[int], start: int, slots: Sequence[Slot]) -> None:
        """The KV of positions from `start` on goes into blocks that nobody else has or can find."""
        for position, slot in enumerate(slots, start):
            block_id = block_table[position // self.block_size]
            self._require_writable(block_id)
            self.kv[block_id][position % self.block_size] = slot

    def _require_writable(self, block_id: int) -> None:
        # A source that is still to be copied has more owners, and is written only behind what they copy.
        assert block_id not in self.known.values(), f"block {block_id} can be found and is written"
        assert self.owners[block_id] - self.num_copiers[block_id] == 1, f"block {block_id} is written by several"

    def require_kv(self, request: Request, block_table: Sequence[int], end: int) -> None:
        """The KV of positions [0, end) is the request's own."""
        for position, slot in enumerate(slots_of(request, 0, end)):
            assert self.kv[block_table[position // self.block_size]][position % self.block_size] == slot

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """`tables`: of all that own blocks."""
        assert Counter(block_id for table in tables for block_id in table) == +self.owners
        assert sorted([*self.free, *self.cached, *+self.owners]) == list(range(self._real.num_blocks))
        assert (self._real.num_free, self._real.num_cached) == (len(self.free), len(self.cached))

    def _next(self) -> int:
        if self.free:
            block_id = self.free.pop(0)
        else:
            block_id = self.cached.pop(0)
            self.known = {slot: b for slot, b in self.known.items() if b != block_id}
            self.num_evictions += 1
        self.owners[block_id] = 1
        self.kv[block_id] = [None] * self.block_size
        return block_id
