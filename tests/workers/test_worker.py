"""A worker as a whole: what it refuses, how requests end on it, and what it tells about itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.sim.loop import run
from cluster.sim.network import SimNetwork
from tests.factories import GREEDY, LEASE_S, in_use, make_request, make_worker, prompt_of, runner_of
from tests.fake_model import expected_tokens
from tests.workers.pair import Pair, copy_of, on_pair
from workers.errors import ConfigError, InvalidRequestError, KVFerryError, OverloadedError
from workers.request import FinishReason

LONG = replace(GREEDY, max_tokens=100)


@pytest.mark.parametrize("prompt", [[], prompt_of(160), prompt_of(500)])
def test_a_request_that_can_never_fit_is_refused_by_every_entrance(prompt):
    async def script(pair: Pair) -> None:
        request = make_request(prompt)
        with pytest.raises(InvalidRequestError, match="from 1 to 159") as caught:
            pair.decode.reserve(request)
        assert caught.value.param == "prompt"
        with pytest.raises(InvalidRequestError):
            pair.decode.submit(request)
        grant = pair.reserve(make_request(4))
        with pytest.raises(InvalidRequestError):
            await pair.prefill.prefill(request, grant)
        pair.decode.abort("r")

    on_pair(script)


def test_the_longest_request_that_is_accepted_gets_its_token():
    async def script(pair: Pair) -> None:
        request = make_request(159, replace(GREEDY, max_tokens=1))
        assert await pair.answer(request) == expected_tokens(request.prompt_token_ids, request.params)

    on_pair(script)


def test_a_request_sent_again_replaces_itself():
    async def script(pair: Pair) -> None:
        request = make_request(20)
        first = pair.reserve(request)
        second = pair.reserve(request)
        assert second.grant_id != first.grant_id
        assert in_use(pair.decode) == {"reserved": 6}
        pair.decode.submit(copy_of(request))
        await asyncio.sleep(0.01)
        pair.decode.submit(copy_of(request))
        await pair.until(lambda: pair.outputs.get("r") and pair.outputs["r"][-1].finish_reason)
        tokens = [token for output in pair.outputs["r"] for token in output.token_ids]
        assert tokens[-8:] == expected_tokens(request.prompt_token_ids, GREEDY)

    on_pair(script)


def test_a_full_worker_grants_nothing_until_there_is_room():
    async def script(pair: Pair) -> None:
        pair.reserve(make_request(100, request_id="first"))
        pair.reserve(make_request(100, request_id="second"))
        with pytest.raises(OverloadedError):
            pair.reserve(make_request(100, request_id="third"))
        pair.decode.abort("first")
        pair.reserve(make_request(100, request_id="third"))
        pair.decode.abort("second")
        pair.decode.abort("third")

    on_pair(script)


def test_grants_that_nobody_uses_run_out_by_themselves_in_a_full_pool():
    """No request, no step and no call has to come by for the pool to recover."""

    async def script(pair: Pair) -> None:
        for seed in range(2):
            pair.reserve(make_request(100, request_id=f"r{seed}"))
        await asyncio.sleep(LEASE_S - 0.01)
        assert pair.decode.engine.scheduler.num_blocks_reserved == 52
        await asyncio.sleep(0.02)
        assert in_use(pair.decode) == {}
        assert {pair.outputs[f"r{seed}"][0].error_type for seed in range(2)} == {"DeadlineError"}

    on_pair(script)


def test_a_router_that_is_not_heard_of_for_a_lease_loses_its_requests():
    async def script(pair: Pair) -> None:
        pair.decode.submit(replace_router(copy_of(make_request(4, replace(LONG, max_tokens=150), "kept"))))
        pair.decode.submit(copy_of(make_request(4, replace(LONG, max_tokens=150), "lost")))
        other = asyncio.create_task(_read(pair, "router-2"))
        await asyncio.sleep(1.0)
        pair._listening[0].cancel()
        await asyncio.sleep(LEASE_S - 0.01)
        assert set(pair.decode.engine.requests) == {"kept", "lost"}
        await asyncio.sleep(0.02)
        assert set(pair.decode.engine.requests) == {"kept"}
        pair.decode.abort("kept")
        other.cancel()

    on_pair(script, idle_within_s=2.0, step_s=lambda batch: 0.1)


def replace_router(request, router_id="router-2"):
    request.router_id = router_id
    return request


async def _read(pair: Pair, router_id: str) -> None:
    async for _ in pair.decode.outputs.stream(router_id):
        pass


def test_a_step_that_fails_ends_its_requests_with_an_error_and_the_worker_goes_on():
    async def script(pair: Pair) -> None:
        for worker in (pair.prefill, pair.decode):
            runner = runner_of(worker.engine)
            execute, runner.execute = runner.execute, lambda batch: 1 // 0  # type: ignore[method-assign, assignment, return-value]
            if worker is pair.prefill:
                with pytest.raises(KVFerryError, match="a step failed: ZeroDivisionError"):
                    await pair.hand_over(make_request(20))
            else:
                worker.submit(copy_of(make_request(20, request_id="here")))
                await pair.until(lambda: pair.outputs.get("here"))
                assert pair.outputs["here"][-1].error_message.endswith(
                    "ZeroDivisionError: integer division or modulo by zero"
                )
            runner.execute = execute  # type: ignore[method-assign]
        request = make_request(20, request_id="next")
        assert await pair.answer(request) == expected_tokens(request.prompt_token_ids, GREEDY)

    on_pair(script)


def test_stats_tell_what_there_is():
    async def script(pair: Pair) -> None:
        await pair.answer(make_request(20))
        prefill, decode = pair.prefill.stats(), pair.decode.stats()
        assert (prefill.num_prompt_tokens_computed, prefill.num_output_tokens) == (20, 1)
        assert (decode.num_prompt_tokens_computed, decode.num_output_tokens) == (0, 7)
        assert prefill.kv_bytes_sent == decode.kv_bytes_received == 20 * pair.decode.layout.token_bytes
        assert prefill.num_frames_sent == decode.num_frames_received > 1
        assert [(p.incarnation, p.transport) for p in prefill.peers] == [(pair.decode.incarnation, "grpc")]
        assert (decode.blocks_total, decode.block_size, decode.max_num_batched_tokens) == (64, 4, 16)
        assert (decode.incarnation, decode.fingerprint) == (pair.decode.incarnation, "hash")

    on_pair(script)


def test_aborting_what_is_not_there_is_no_error():
    async def script(pair: Pair) -> None:
        for worker in pair.workers:
            worker.abort("nobody")
        await pair.answer(make_request(5))
        for worker in pair.workers:
            worker.abort("r")

    on_pair(script)


def test_a_worker_on_a_taken_port_says_so():
    async def main() -> None:
        network = SimNetwork()
        first = make_worker(network.host())
        await first.start()
        second = make_worker(network.host(), port=int(first.address.rsplit(":", 1)[1]))
        with pytest.raises(ConfigError, match="port is in use"):
            await second.start()
        await first.stop()

    run(main())


def test_stopping_a_worker_at_work_ends_its_tasks():
    async def main() -> None:
        pair = Pair()
        await pair.start()
        handing = asyncio.create_task(pair.hand_over(make_request(100)))
        pair.decode.submit(copy_of(make_request(5, LONG, "decoding")))
        await asyncio.sleep(0.03)
        await pair.stop()
        with pytest.raises(KVFerryError):
            await handing
        assert pair.prefill.engine.block_manager.num_free == 64

    run(main())


def test_every_token_comes_once_and_the_last_says_why():
    async def script(pair: Pair) -> None:
        pair.decode.submit(copy_of(make_request(9)))
        await pair.until(lambda: pair.outputs.get("r") and pair.outputs["r"][-1].finish_reason)
        outputs = pair.outputs["r"]
        assert [o.index for o in outputs] == list(range(8))
        assert [o.finish_reason for o in outputs] == [None] * 7 + [FinishReason.LENGTH]
        assert outputs[-1].timeline is not None

    on_pair(script)
