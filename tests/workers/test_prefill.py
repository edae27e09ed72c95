"""The prefill half against a real decode half: what is sent when, and how every hand-off ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.sim.loop import virtual_loop
from cluster.sim.network import corrupt, delay, drop, duplicate
from tests.factories import BLOCK_SIZE, GREEDY, SEEDED, in_use, make_request, prompt_of
from tests.fake_model import expected_tokens
from tests.workers.pair import Pair, on_pair
from workers.errors import (
    DeadlineError,
    FrameError,
    LayoutMismatchError,
    StaleGrantError,
    UnavailableError,
)
from workers.kv_transfer.frame import HEADER_BYTES, Buffer, ranges_of_frames
from workers.kv_transfer.kv_rows import KVRows
from workers.request import FinishReason

LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 15, 16, 17, 33, 100]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_handed_over_request_is_answered_as_without_a_cache(params):
    async def script(pair: Pair) -> None:
        for length in LENGTHS:
            request = make_request(length, params, f"r{length}")
            assert await pair.answer(request) == expected_tokens(request.prompt_token_ids, params)
        num_tokens = sum(LENGTHS)
        assert pair.decode.engine.num_prompt_tokens_computed == 0
        assert pair.prefill.engine.num_prompt_tokens_computed == num_tokens
        layout = pair.decode.layout
        assert pair.decode.decode.num_bytes_received == num_tokens * layout.token_bytes

    on_pair(script)


def test_hand_offs_at_once_share_steps_and_are_all_right():
    async def script(pair: Pair) -> None:
        requests = [make_request(length, SEEDED, f"r{length}") for length in LENGTHS]
        answers = await asyncio.gather(*(pair.answer(request) for request in requests))
        assert answers == [expected_tokens(r.prompt_token_ids, SEEDED) for r in requests]
        assert pair.decode.engine.max_num_running > 1
        assert pair.prefill.engine.max_num_running > 1

    on_pair(script)


def test_the_first_frames_leave_while_later_chunks_are_computed():
    async def script(pair: Pair) -> None:
        request = make_request(100)
        answering = asyncio.create_task(pair.answer(request))
        await pair.until(lambda: pair.decode.decode.num_frames_received)
        assert pair.prefill.engine.num_prompt_tokens_computed <= 32
        await answering
        sent, overlapped = pair.prefill._frames.num_frames_sent, pair.prefill._frames.num_frames_overlapped
        assert 0.7 * sent < overlapped < sent

    on_pair(script)


def test_chunks_that_are_ready_before_there_is_a_credit_go_together():
    async def script(pair: Pair) -> None:
        pair.network.fault("Put", delay(2.0), count=2)
        request = make_request(100)
        assert await pair.answer(request) == expected_tokens(request.prompt_token_ids, GREEDY)
        layout, config = pair.prefill.layout, pair.prefill.config.transfer
        as_few = list(ranges_of_frames(layout, 16, 100, config.frame_bytes))
        of_chunk = list(ranges_of_frames(layout, 0, 16, config.frame_bytes))
        assert pair.prefill._frames.num_frames_sent == len(of_chunk) + len(as_few)

    on_pair(script)


def test_a_long_prompt_that_is_cached_goes_in_frames_as_small_as_any_other():
    async def script(pair: Pair) -> None:
        sizes: list[int] = []

        def noted(data: bytes) -> Sequence[tuple[float, bytes]]:
            sizes.append(len(data))
            return ((0.0, data),)

        request = make_request(120)
        await pair.answer(request)
        pair.network.fault("Put", noted)
        # This one has none of it.
        await pair.hand_over(make_request(120, request_id="again"), pair.workers[2])
        await pair.until(lambda: any(o.finish_reason for o in pair.outputs.get("again", ())))
        assert pair.prefill.engine.num_prompt_tokens_computed < 2 * 120
        assert sum(sizes) > 120 * pair.prefill.layout.token_bytes
        assert max(sizes) <= HEADER_BYTES + pair.prefill.config.transfer.frame_bytes

    on_pair(script, num_decode=2, enable_prefix_caching=True)


def test_token_1_does_not_wait_for_the_transfer():
    async def script(pair: Pair) -> None:
        pair.network.fault("Put", delay(2.0))
        began = virtual_loop().time()
        first = await pair.hand_over(make_request(10))
        assert virtual_loop().time() - began < 0.1
        assert first.token_ids == (expected_tokens(prompt_of(10), GREEDY)[0],)
        await pair.until(lambda: pair.outputs.get("r"))
        assert virtual_loop().time() - began > 2
        await pair.until(lambda: pair.outputs["r"][-1].finish_reason)

    on_pair(script)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_an_answer_that_token_1_ends_goes_no_further(reason):
    async def script(pair: Pair) -> None:
        token = expected_tokens(prompt_of(20), GREEDY)[0]
        ends = {FinishReason.LENGTH: {"max_tokens": 1}, FinishReason.STOP: {"stop_token_ids": (token,)}}[reason]
        first = await pair.hand_over(make_request(20, replace(GREEDY, **ends)))  # type: ignore[arg-type]
        assert (first.token_ids, first.finish_reason) == ((token,), reason)
        await pair.until_idle()
        assert pair.decode.engine.num_steps == 0
        assert pair.outputs == {}

    on_pair(script)


def test_a_resumed_request_is_handed_over_with_the_tokens_it_has():
    async def script(pair: Pair) -> None:
        whole = expected_tokens(prompt_of(6), SEEDED)
        request = make_request(6, SEEDED, output_token_ids=whole[:3])
        first = await pair.hand_over(request)
        assert (first.index, first.token_ids) == (3, (whole[3],))
        await pair.until(lambda: any(o.finish_reason for o in pair.outputs.get("r", ())))
        assert [t for o in pair.outputs["r"] for t in o.token_ids] == whole[4:]
        assert pair.decode.engine.num_prompt_tokens_computed == 0

    on_pair(script)


@pytest.mark.parametrize("at", [0, 5, 30, 60, -1])
def test_a_frame_damaged_on_its_way_ends_the_hand_off_before_any_token_that_depends_on_it(at):
    async def script(pair: Pair) -> None:
        pair.network.fault("Put", corrupt(at), skip=1, count=1)
        with pytest.raises((FrameError, StaleGrantError)):
            await pair.hand_over(make_request(100))
        await pair.until(lambda: pair.outputs.get("r"))
        (output,) = pair.outputs["r"]
        assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, ())
        assert pair.decode.engine.num_output_tokens == 0

    on_pair(script)


def test_frames_delivered_twice_do_no_harm():
    async def script(pair: Pair) -> None:
        pair.network.fault("Put", duplicate)
        request = make_request(50)
        assert await pair.answer(request) == expected_tokens(request.prompt_token_ids, GREEDY)

    on_pair(script)


@pytest.mark.parametrize("method", ["Connect", "Put", "Commit"])
@pytest.mark.parametrize("answers", [False, True])
def test_a_message_that_gets_lost_ends_the_hand_off_within_its_deadline(method, answers):
    async def script(pair: Pair) -> None:
        began = virtual_loop().time()
        hook = pair.network.fault(method, drop, answers=answers)
        try:
            answer = await asyncio.wait_for(pair.answer(make_request(20)), 3.0)
            # Only the answer to Commit is lost: the request itself goes on.
            assert (method, answers) == ("Commit", True)
            assert answer == expected_tokens(prompt_of(20), GREEDY)
        except (DeadlineError, FrameError):
            assert (method, answers) != ("Commit", True)
        hook.remove()
        pair.decode.abort("r")
        await pair.until_idle(within_s=3.0)
        assert virtual_loop().time() - began < 6

    on_pair(script, transfer={"rpc_timeout_s": 2.0})


def test_failed_frames_do_not_wear_out_the_window_of_credits():
    """Many hand-offs break with the window full; as many as before still pass afterwards."""

    async def script(pair: Pair) -> None:
        # Slower than chunks are computed, so that frames wait for credits when one fails.
        hook = pair.network.fault("Put", lambda data: [(0.03, copy) for _, copy in corrupt(-1)(data)], skip=2)
        for seed in range(12):
            with pytest.raises(FrameError):
                await asyncio.wait_for(pair.answer(make_request(prompt_of(100, seed), request_id=f"bad{seed}")), 5.0)
        hook.remove()
        request = make_request(100)
        answer = await asyncio.wait_for(pair.answer(request), 5.0)
        assert answer == expected_tokens(request.prompt_token_ids, GREEDY)
        (peer,) = pair.prefill._peers._peers.values()
        assert peer.window._value == 2

    on_pair(script)


@pytest.mark.parametrize("credits", [1, 2, 5])
def test_no_more_frames_are_in_flight_than_credits_were_given(credits):
    async def script(pair: Pair) -> None:
        receive, in_flight = pair.decode.decode.receive, [0, 0]

        async def count(data: Buffer, elsewhere: KVRows | None = None) -> None:
            in_flight[0] += 1
            in_flight[1] = max(in_flight)
            await asyncio.sleep(0.05)
            await receive(data, elsewhere)
            in_flight[0] -= 1

        pair.decode.decode.receive = count  # type: ignore[method-assign]
        requests = [make_request(prompt_of(60, seed), request_id=f"r{seed}") for seed in range(3)]
        answers = await asyncio.gather(*(pair.answer(request) for request in requests))
        assert answers == [expected_tokens(r.prompt_token_ids, GREEDY) for r in requests]
        assert in_flight == [0, credits]

    on_pair(script, transfer={"credits": credits})


def test_a_decode_worker_that_dies_ends_the_hand_off_at_once():
    async def script(pair: Pair) -> None:
        handing = asyncio.create_task(pair.hand_over(make_request(100), pair.workers[2]))
        await asyncio.sleep(0.02)
        pair.hosts[2].kill()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(handing, 1.0)
        pair.workers[2].abort("r")

    on_pair(script, num_decode=2)


def test_a_grant_of_a_worker_that_is_not_there_is_refused_and_forgotten():
    async def script(pair: Pair) -> None:
        grant = replace(pair.reserve(make_request(8)), address="127.0.0.1:1")
        with pytest.raises(UnavailableError):
            await pair.prefill.prefill(make_request(8), grant)
        assert not pair.prefill.engine.requests
        pair.decode.abort("r")

    on_pair(script)


def test_a_decode_worker_with_another_layout_is_refused_before_anything_is_computed():
    async def script(pair: Pair) -> None:
        pair.decode.layout = replace(pair.decode.layout, fingerprint="another model")
        with pytest.raises(LayoutMismatchError, match="fingerprint") as caught:
            await pair.hand_over(make_request(8))
        assert caught.value.param == "fingerprint"
        assert pair.prefill.engine.num_steps == 0
        pair.decode.abort("r")

    on_pair(script)


def test_what_is_held_for_sending_counts_as_in_use():
    async def script(pair: Pair) -> None:
        pair.network.fault("Put", delay(1.0))
        await pair.hand_over(make_request(20))
        assert in_use(pair.prefill) == {"in_use": 5}
        assert in_use(pair.decode) == {"reserved": 6}
        await pair.until(lambda: pair.outputs.get("r") and pair.outputs["r"][-1].finish_reason)

    on_pair(script)
