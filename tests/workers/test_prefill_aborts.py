"""Aborts and cancellations at any moment of a hand-off."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.factories import GREEDY, LEASE_S, make_request
from tests.workers.pair import Pair, on_pair
from workers.errors import (
    AbortedError,
)


@pytest.mark.parametrize("after_s", [0.0, 0.0003, 0.001, 0.004, 0.0065, 0.008, 0.015, 0.03, 0.05, 0.08])
@pytest.mark.parametrize("at", ["prefill", "decode", "both"])
def test_an_abort_at_any_moment_frees_both_sides(after_s, at):
    async def script(pair: Pair) -> None:
        answering = asyncio.create_task(pair.answer(make_request(40, replace(GREEDY, max_tokens=4))))
        await asyncio.sleep(after_s)
        for worker in (pair.prefill, pair.decode):
            if at in ("both", "prefill" if worker is pair.prefill else "decode"):
                worker.abort("r")
        await asyncio.wait([answering], timeout=1.0)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await pair.until_idle(within_s=LEASE_S / 2)

    on_pair(script)


def test_an_abort_in_the_very_turn_of_the_loop_in_which_prefill_began_frees_both_sides():
    async def script(pair: Pair) -> None:
        # Connected already, so that nothing in prefill's way waits.
        await pair.answer(make_request(4, request_id="earlier"))
        grant = pair.reserve(request := make_request(40))
        prefilling = asyncio.create_task(pair.prefill.prefill(request, grant))
        asyncio.get_running_loop().call_soon(pair.prefill.abort, "r")
        with pytest.raises(AbortedError):
            await asyncio.wait_for(prefilling, 5.0)
        await pair.until_idle()

    on_pair(script)


@pytest.mark.parametrize("after_s", [0.0, 0.0003, 0.001, 0.004, 0.0065, 0.02])
def test_a_cancelled_prefill_ends_the_request_and_gives_the_grant_back(after_s):
    async def script(pair: Pair) -> None:
        await pair.answer(make_request(4, request_id="earlier"))
        prefilling = asyncio.create_task(pair.hand_over(make_request(60)))
        await asyncio.sleep(after_s)
        prefilling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prefilling
        assert not pair.prefill.engine.requests
        await pair.until_idle()
        # It does not go on to the prompt's end.
        assert pair.prefill.engine.num_prompt_tokens_computed < 4 + 60

    on_pair(script)
