"""What a worker tells of its prefix cache is what is in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.sim.loop import run
from protos import worker_pb2 as pb
from workers import kv_events
from workers.engine.block_manager import BlockManager
from workers.kv_events import KVEvents

NUM_BLOCKS = 6
Stream = AsyncGenerator[pb.StreamKVEventsResponse, None]


def fill(blocks: BlockManager, numbers: list[int]) -> None:
    """KV of these, as one request computes and leaves it; older KV makes room."""
    taken = blocks.allocate(len(numbers))
    for block_id, number in zip(taken, numbers, strict=True):
        blocks.publish(block_id, number.to_bytes(16, "big"))
    blocks.free(taken)


class Listener:
    """Believes what it is told."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.numbers: list[int] = []
        self.num_resets = 0

    def hear(self, message: pb.StreamKVEventsResponse) -> None:
        assert message.incarnation == "i"
        self.numbers.append(message.number)
        if message.reset:
            self.known.clear()
            self.num_resets += 1
        self.known -= {message.left[at : at + 16] for at in range(0, len(message.left), 16)}
        self.known |= {message.entered[at : at + 16] for at in range(0, len(message.entered), 16)}

    async def listen(self, stream: Stream) -> None:
        async for message in stream:
            self.hear(message)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=NUM_BLOCKS, unique=True), st.booleans()),
        max_size=12,
    )
)
def test_whoever_listens_knows_what_is_there(history):
    async def main() -> None:
        blocks = BlockManager(NUM_BLOCKS, 4)
        events, listener = KVEvents(blocks, "i"), Listener()
        async with aclosing(events.stream()) as stream:
            listening = asyncio.create_task(listener.listen(stream))
            for numbers, pause in history:
                fill(blocks, numbers)
                if pause:
                    await asyncio.sleep(1.0)
                    assert listener.known == set(blocks.known_hashes)
            await asyncio.sleep(1.0)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        assert listener.known == set(blocks.known_hashes)
        assert listener.numbers == list(range(len(listener.numbers)))

    run(main())


def test_changes_of_one_moment_go_together():
    async def main() -> None:
        blocks = BlockManager(100, 4)
        listener = Listener()
        async with aclosing(KVEvents(blocks, "i").stream()) as stream:
            listener.hear(await anext(stream))
            for number in range(50):
                fill(blocks, [number])
            listener.hear(await anext(stream))
            assert len(listener.known) == 50
            assert listener.num_resets == 1

    run(main())


def test_who_reads_too_slowly_is_told_all_anew_and_costs_no_memory():
    async def main() -> None:
        blocks = BlockManager(NUM_BLOCKS, 4)
        events, listener = KVEvents(blocks, "i"), Listener()
        async with aclosing(events.stream()) as stream:
            listener.hear(await anext(stream))
            for number in range(10 * NUM_BLOCKS):
                fill(blocks, [number])
                assert len(events._subscribers[0].changes) <= NUM_BLOCKS + 1
            listener.hear(await anext(stream))
            assert listener.num_resets == 2
            assert listener.known == set(blocks.known_hashes)

    run(main())


def test_a_snapshot_larger_than_a_message_comes_in_several(monkeypatch):
    monkeypatch.setattr(kv_events, "_MAX_HASHES", 16)

    async def main() -> None:
        blocks = BlockManager(100, 4)
        fill(blocks, list(range(60)))
        listener = Listener()
        async with aclosing(KVEvents(blocks, "i").stream()) as stream:
            for _ in range(4):
                listener.hear(await anext(stream))
        assert listener.known == set(blocks.known_hashes)
        assert listener.num_resets == 1

    run(main())


def test_who_leaves_is_told_nothing_more():
    async def main() -> None:
        blocks = BlockManager(NUM_BLOCKS, 4)
        events = KVEvents(blocks, "i")
        async with aclosing(events.stream()) as stream:
            await anext(stream)
            assert len(events._subscribers) == 1
        assert not events._subscribers

    run(main())
