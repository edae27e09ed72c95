"""Aborts that come while prefill ends."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.factories import GREEDY, make_request, prompt_of
from tests.fake_model import expected_tokens
from tests.workers.pair import Pair, on_pair
from workers.worker import Worker


@pytest.mark.parametrize("at", ["prefill", "decode", "both"])
def test_an_abort_that_races_the_end_of_prefill_harms_nobody(at):
    """Before, at and after the step that samples token 1, and up to the commit; who shares these steps sees nothing."""

    async def script(pair: Pair) -> None:
        for i in range(40):
            request = make_request(prompt_of(20, i), request_id=f"r{i}")
            answering = asyncio.create_task(pair.answer(request))
            bystander = make_request(prompt_of(60, i), request_id=f"bystander{i}")
            others = asyncio.create_task(pair.answer(bystander))
            await pair.until(partial(_lacks_one_step, pair.prefill, f"r{i}"))
            await asyncio.sleep(0.0004 * i)
            for worker in (pair.prefill, pair.decode):
                if at in ("both", "prefill" if worker is pair.prefill else "decode"):
                    worker.abort(f"r{i}")
            await asyncio.wait([answering], timeout=0.5)
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            assert await others == expected_tokens(bystander.prompt_token_ids, GREEDY)
            await pair.until_idle()

    on_pair(script)


def _lacks_one_step(worker: Worker, request_id: str) -> bool:
    """The step that computes the last of its prompt is under way."""
    return any(
        request.request_id == request_id and 0 < request.num_prompt_tokens - request.num_computed_tokens <= 16
        for request in worker.engine._in_step
    )
