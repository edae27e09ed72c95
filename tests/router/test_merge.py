"""Several streams as one: all end together."""

from __future__ import annotations

import asyncio

import pytest

from router.merge import merge
from workers.errors import UnavailableError


def test_merge_ends_all_streams_with_the_first_failure():
    closed: list[int] = []

    async def stream(index: int):
        try:
            for item in range(3):
                yield item
                await asyncio.sleep(0)
            if index == 1:
                raise UnavailableError("gone")
            await asyncio.Event().wait()
        finally:
            closed.append(index)

    got: list[tuple[int, int]] = []

    async def run() -> None:
        async for item in merge([stream(0), stream(1), stream(2)]):
            got.append(item)  # noqa: PERF401  What came before the failure is wanted too.

    with pytest.raises(UnavailableError):
        asyncio.run(run())
    assert sorted(got) == [(index, item) for index in range(3) for item in range(3)]
    assert sorted(closed) == [0, 1, 2]


def test_closing_a_merge_whose_reader_is_slow_closes_all_streams():
    closed: list[int] = []

    async def stream(index: int):
        try:
            while True:
                yield index
        finally:
            closed.append(index)

    async def run() -> None:
        merged = merge([stream(0), stream(1)])
        await anext(merged)
        await asyncio.sleep(0.01)
        await asyncio.wait_for(merged.aclose(), 1)

    asyncio.run(run())
    assert sorted(closed) == [0, 1]
