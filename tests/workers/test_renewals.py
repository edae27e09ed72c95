"""Prefill keeps its grants alive for as long as it computes, and hears when one is lost."""

from __future__ import annotations

import asyncio

import pytest

from cluster.sim.loop import virtual_loop
from cluster.sim.network import drop
from tests.factories import GREEDY, LEASE_S, make_request, prompt_of
from tests.fake_model import expected_tokens
from tests.workers.pair import Pair, on_pair
from workers.errors import (
    KVFerryError,
    StaleGrantError,
)
from workers.request import FinishReason


def test_renewal_keeps_a_prefill_alive_that_takes_many_leases():
    async def script(pair: Pair) -> None:
        request = make_request(100)
        answer = await pair.answer(request)
        assert virtual_loop().time() > 3 * LEASE_S
        assert answer == expected_tokens(request.prompt_token_ids, GREEDY)

    on_pair(script, step_s=lambda batch: LEASE_S / 2)


def test_a_lost_lease_ends_the_prefill():
    async def script(pair: Pair) -> None:
        hook = pair.network.fault("Renew", drop)
        # The steps in which its prompt has no part let the grant's time run out.
        prefilling = asyncio.create_task(pair.hand_over(make_request(100)))
        await pair.until(lambda: pair.outputs.get("r"))
        assert pair.outputs["r"][0].error_type == "DeadlineError"
        hook.remove()
        with pytest.raises(StaleGrantError):
            await prefilling

    on_pair(script, idle_within_s=5.0, step_s=lambda batch: 4.0)


def test_a_peer_that_answers_no_renewal_does_not_cost_others_their_leases():
    async def script(pair: Pair) -> None:
        silent, healthy = pair.workers[1:]
        requests = [make_request(prompt_of(60, seed), request_id=f"r{seed}") for seed in range(2)]
        first = asyncio.create_task(pair.hand_over(requests[0], silent))
        second = asyncio.create_task(pair.hand_over(requests[1], healthy))
        await asyncio.sleep(1.0)
        pair.network.fault("Renew", drop, to=silent.address)
        assert (await second).token_ids == (expected_tokens(requests[1].prompt_token_ids, GREEDY)[0],)
        await pair.until(lambda: any(o.finish_reason is FinishReason.LENGTH for o in pair.outputs.get("r1", ())))
        with pytest.raises(KVFerryError):
            await first

    on_pair(script, num_decode=2, idle_within_s=6.0, step_s=lambda batch: 5.0)
