"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(stream's index, item) in the order of arrival. The first failure, or closing this, closes all streams."""
    # One place a stream: a slow reader slows the streams, and nothing piles up.
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T] | Exception | None]
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((index, item))
    except Exception as error:  # noqa: BLE001  It is raised in merge.
        await queue.put(error)
    else:
        await queue.put(None)
