"""Which worker holds which block, as far as KV events have told. Bounded: what was not asked for longest is forgotten.

Blocks are named by their hashes (workers/engine/block_hash.py), each of which stands for all tokens up to its block's
end; workers by their incarnations. Nothing is wrong where this is: a worker finds out itself what it has.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping


class PrefixIndex:
    """At most `max_num_blocks` blocks, whoever holds them."""

    def __init__(self, max_num_blocks: int) -> None:
        self._max_num_blocks = max_num_blocks
        # Of each block, the bits of those that hold it. Least recently used first.
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def enter(self, incarnation: str, hashes: Iterable[bytes]) -> None:
        """The worker has these now, in this order."""
        bit = self._bits.setdefault(incarnation, self._unused_bit())
        # A prefix is of use without the blocks behind it, not the other way round: they are forgotten first.
        for block_hash in reversed(list(hashes)):
            self._holders[block_hash] = self._holders.pop(block_hash, 0) | bit
        while len(self._holders) > self._max_num_blocks:
            self._holders.popitem(last=False)

    def leave(self, incarnation: str, hashes: Iterable[bytes]) -> None:
        """The worker has these no more. What is not known to be there is no error."""
        bit = self._bits.get(incarnation, 0)
        for block_hash in hashes:
            holders = self._holders.get(block_hash, 0)
            if holders & ~bit:
                self._holders[block_hash] = holders & ~bit
            elif holders:
                del self._holders[block_hash]

    def drop(self, incarnation: str) -> None:
        """Forget all that it has. One that is unknown is no error."""
        bit = self._bits.get(incarnation, 0)
        self.leave(incarnation, [block_hash for block_hash, holders in self._holders.items() if holders & bit])
        self._bits.pop(incarnation, None)

    def match(self, unit_hashes: Iterable[bytes], block_units: Mapping[str, int]) -> dict[str, int]:
        """How many units of a prefix each worker holds, of those given with the number of units in their blocks.

        Takes one hash more than somebody holds, and none where nobody holds anything.
        """
        found = dict.fromkeys(block_units, 0)
        # The bits of those that hold all so far, by the units in a block.
        holding: dict[int, int] = defaultdict(int)
        for incarnation, units in block_units.items():
            if bit := self._bits.get(incarnation):
                holding[units] |= bit
        used, end = [], 0
        for end, block_hash in enumerate(unit_hashes if holding else (), start=1):
            if block_hash in self._holders:
                used.append(block_hash)
            for units in [units for units in holding if end % units == 0]:
                lost = holding[units] & ~self._holders.get(block_hash, 0)
                self._note(found, lost, end - units)
                holding[units] ^= lost
            if not any(holding.values()):
                break
        for units, bits in holding.items():
            self._note(found, bits, end // units * units)
        for block_hash in reversed(used):
            self._holders.move_to_end(block_hash)
        return found

    def _note(self, found: dict[str, int], bits: int, num_units: int) -> None:
        if bits:
            found.update((incarnation, num_units) for incarnation in found if self._bits.get(incarnation, 0) & bits)

    def _unused_bit(self) -> int:
        used = sum(self._bits.values())
        return ~used & (used + 1)
