"""A prefill worker that stops gives all of its grants back at once, and waits for those of requests aborted before."""

from __future__ import annotations

import asyncio

import pytest

from cluster.sim.loop import virtual_loop
from cluster.sim.network import delay
from tests.factories import make_request
from tests.workers.pair import Pair, copy_of, on_pair


def test_all_grants_are_given_back_together_and_those_of_the_aborted_too():
    async def script(pair: Pair) -> None:
        requests = [make_request(60, request_id=f"r{i}") for i in range(4)]
        prefills = [asyncio.create_task(pair.prefill.prefill(copy_of(one), pair.reserve(one))) for one in requests]
        await pair.until(lambda: len(pair.prefill._prefill._shipments) == 4)
        hook = pair.network.fault("Release", delay(1.0))
        pair.prefill.abort("r0")
        await asyncio.sleep(0.0001)
        began_s = virtual_loop().time()
        await pair.prefill._prefill.close()
        assert hook.num_seen == 4
        assert virtual_loop().time() - began_s == pytest.approx(1.0, abs=0.1)
        await asyncio.gather(*prefills, return_exceptions=True)

    on_pair(script)
