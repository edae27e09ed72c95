"""The search for the highest rate, over servers whose capacity is known."""

from __future__ import annotations

import asyncio
import math

import pytest

from cluster.bench.capacity import FACTOR, Capacity, find_capacity, highest_rate
from cluster.bench.load import Workload
from cluster.bench.samples import Slo
from tests.cluster.bench.stub_server import StubServer, served_by


def search(limit: float, first_rate: float) -> Capacity:
    async def passes(rate: float) -> bool:
        return rate <= limit

    return asyncio.run(highest_rate(passes, first_rate))


@pytest.mark.parametrize("limit", [0.06, 0.1, 0.2499, 0.25, 0.26, 0.7, 3.0, 50.0])
def test_it_finds_the_highest_rate_below_the_limit(limit: float):
    found = search(limit, 0.25)
    assert found.rate <= limit < found.rate * FACTOR
    assert len(found.tried) <= 4 + abs(math.log(limit / 0.25, FACTOR)) / 2 + 4


def test_where_nothing_passes_capacity_is_zero():
    found = search(0.0, 0.25)
    assert found.rate == 0.0
    assert found.tried == ((0.25, False), (0.0, True), *found.tried[2:])
    assert not any(passed for rate, passed in found.tried if rate)


def test_where_not_even_one_at_a_time_is_good_nothing_slower_is_tried():
    assert search(-1.0, 0.25) == Capacity(0.0, ((0.25, False), (0.0, False)))


def test_a_server_of_one_request_at_a_time_is_found_out():
    """0.02 s each: at 50 a second it is full, and at that rate queues grow without end."""

    async def found() -> Capacity:
        workload = Workload(num_requests=30, num_prompt_tokens=4, max_tokens=2)
        async with served_by(StubServer(ttft_s=0.02, tpot_s=0.0, num_at_once=1)) as target:
            return await find_capacity(target, workload, Slo(ttft_s=0.1), first_rate=30.0)

    assert 5.0 < asyncio.run(found()).rate < 75.0
