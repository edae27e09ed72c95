"""KV events: which blocks enter and leave the prefix cache, told to routers that choose workers by them.

A hint: nothing is wrong where events are late or lost, so they are told in batches, and who falls behind gets all anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import islice

from protos import worker_pb2 as pb
from workers.engine.block_manager import BlockManager

# Changes wait so long for others to go with them.
_BATCH_S = 0.02
# Of 16 bytes each, in one message.
_MAX_HASHES = 1 << 16


class KVEvents:
    def __init__(self, blocks: BlockManager, incarnation: str) -> None:
        self._blocks = blocks
        self._incarnation = incarnation
        self._subscribers: list[_Subscriber] = []
        blocks.on_known = self._note

    async def stream(self) -> AsyncGenerator[pb.StreamKVEventsResponse, None]:
        """Everything that is known now, then every change."""
        subscriber = _Subscriber()
        self._subscribers.append(subscriber)
        number = 0
        try:
            while True:
                yield self._message(subscriber, number)
                number += 1
                await subscriber.news.wait()
                await asyncio.sleep(_BATCH_S)
        finally:
            self._subscribers.remove(subscriber)

    def _note(self, block_hash: bytes, known: bool) -> None:
        for subscriber in self._subscribers:
            subscriber.note(block_hash, known, self._blocks.num_blocks)

    def _message(self, subscriber: _Subscriber, number: int) -> pb.StreamKVEventsResponse:
        reset = subscriber.missed
        if reset:
            subscriber.missed = False
            subscriber.changes = dict.fromkeys(self._blocks.known_hashes, True)
        changes = subscriber.take(_MAX_HASHES)
        return pb.StreamKVEventsResponse(
            incarnation=self._incarnation,
            number=number,
            reset=reset,
            entered=b"".join(h for h, known in changes if known),
            left=b"".join(h for h, known in changes if not known),
        )


class _Subscriber:
    """What one router has not heard yet: of each hash, the last that happened."""

    def __init__(self) -> None:
        self.changes: dict[bytes, bool] = {}
        self.missed = True
        self.news = asyncio.Event()

    def note(self, block_hash: bytes, known: bool, most: int) -> None:
        """Where more than `most` wait, all that is known is the shorter story."""
        if not self.missed:
            self.changes[block_hash] = known
            self.missed = len(self.changes) > most
            self.news.set()

    def take(self, most: int) -> list[tuple[bytes, bool]]:
        taken = list(islice(self.changes.items(), most))
        for block_hash, _ in taken:
            del self.changes[block_hash]
        if self.changes:
            self.news.set()
        else:
            self.news.clear()
        return taken
