"""A hand-off that one side ends: the other hears of it in time, and neither keeps a block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from cluster.sim.loop import virtual_loop
from cluster.sim.network import drop
from tests.factories import GREEDY, LEASE_S, in_use, make_request, prompt_of, runner_of
from tests.fake_model import expected_tokens
from tests.workers.pair import Pair, on_pair
from workers.engine.executor import StepResult
from workers.engine.scheduler import SchedulerOutput
from workers.errors import DeadlineError, FrameError, InvalidRequestError, KVFerryError, StaleGrantError

LONG = replace(GREEDY, max_tokens=40)
HALF_AN_HOUR_S = 1800.0


@pytest.mark.parametrize("after_s", [0.0, 0.01, 1.0, LEASE_S - 1])
def test_prefill_hears_within_a_lease_that_decode_has_aborted_though_its_step_takes_half_an_hour(after_s):
    async def script(pair: Pair) -> None:
        prefilling = asyncio.create_task(pair.hand_over(make_request(40)))
        await asyncio.sleep(after_s)
        pair.decode.abort("r")
        began = virtual_loop().time()
        with pytest.raises(StaleGrantError):
            await prefilling
        assert virtual_loop().time() - began < LEASE_S
        assert not pair.prefill.engine.requests
        await asyncio.sleep(HALF_AN_HOUR_S)

    on_pair(script, step_s=lambda batch: HALF_AN_HOUR_S)


@pytest.mark.parametrize("length", [1, 20, 100])
@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.003, 0.006, 0.0075, 0.012, 0.03])
def test_decode_may_abort_at_any_moment_and_prefill_frees_its_blocks(after_s, length):
    async def script(pair: Pair) -> None:
        prefilling = asyncio.create_task(pair.hand_over(make_request(length, LONG)))
        await asyncio.sleep(after_s)
        pair.decode.abort("r")
        await asyncio.wait((prefilling,), timeout=LEASE_S)
        # Token 1 may have been there by then.
        assert prefilling.done()
        assert prefilling.exception() is None or isinstance(prefilling.exception(), StaleGrantError)

    on_pair(script)


@pytest.mark.parametrize("where", ["layout", "receive", "commit"])
@pytest.mark.parametrize("error", [InvalidRequestError("no"), FrameError("no"), KeyError("a bug")])
def test_whatever_decode_refuses_leaves_no_block_on_either_side(where, error, monkeypatch):
    def refuse(*args: Any) -> NoReturn:
        raise error

    async def refuse_later(*args: Any) -> NoReturn:
        raise error

    async def script(pair: Pair) -> None:
        # Decode's own layout is the one that is asked about.
        owner: Any = {"layout": type(pair.decode.layout)}.get(where, pair.decode.decode)
        name = {"layout": "require_convertible"}.get(where, where)
        monkeypatch.setattr(owner, name, refuse_later if where == "receive" else refuse)
        try:
            await pair.hand_over(make_request(20, LONG))
            assert where == "commit", "token 1 waits for no commit, but for the KV before it"
        except KVFerryError:
            assert where != "commit"
            pair.decode.abort("r")  # As the router does whose prefill failed.
        await pair.until(lambda: not in_use(pair.decode), within_s=0.5)
        assert pair.decode.engine.num_output_tokens == 0
        monkeypatch.undo()

    on_pair(script)


def _step_raises(batch: SchedulerOutput) -> list[StepResult]:
    raise RuntimeError("out of memory")


def _request_fails(batch: SchedulerOutput) -> list[StepResult]:
    return [StepResult(error=InvalidRequestError("its grammar is too deep")) for _ in batch.requests]


@pytest.mark.parametrize("execute", [_step_raises, _request_fails])
@pytest.mark.parametrize("num_good_steps", [0, 1, 3])
def test_a_prompt_that_fails_on_prefill_gives_decode_its_room_back_at_once(execute, num_good_steps):
    async def script(pair: Pair) -> None:
        fail_after(pair, num_good_steps, execute)
        with pytest.raises(KVFerryError):
            await pair.hand_over(make_request(100))
        assert pair.decode.engine.scheduler.num_blocks_reserved
        await pair.until(lambda: not in_use(pair.decode), within_s=0.1)
        assert pair.decode.engine.num_output_tokens == 0

    on_pair(script)


def fail_after(pair: Pair, num_good_steps: int, execute: Callable[[SchedulerOutput], list[StepResult]]) -> None:
    runner = runner_of(pair.prefill.engine)
    good = runner.execute

    def either(batch: SchedulerOutput) -> list[StepResult]:
        return (good if len(runner.steps) < num_good_steps else execute)(batch)

    runner.execute = either  # type: ignore[method-assign]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 9])
def test_a_prompt_that_prefill_gives_up_when_part_of_its_kv_is_there_is_never_answered(count):
    async def script(pair: Pair) -> None:
        prefilling = asyncio.create_task(pair.hand_over(make_request(100, LONG)))
        await pair.until(lambda: pair.prefill.engine.requests and pair.decode.decode.num_frames_received >= count)
        pair.prefill.abort("r")
        with pytest.raises(KVFerryError):
            await prefilling
        await pair.until_idle()
        assert pair.decode.engine.num_output_tokens == 0
        assert not any(output.token_ids for output in pair.outputs.get("r", ()))

    on_pair(script)


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("nth", range(6))
def test_any_one_frame_that_gets_lost_ends_the_hand_off_within_its_deadline(nth, answers):
    """Nobody counts towards a number of frames that is never reached."""

    async def script(pair: Pair) -> None:
        began = virtual_loop().time()
        pair.network.fault("Put", drop, answers=answers, skip=nth, count=1)
        with pytest.raises((DeadlineError, FrameError)):
            # 3 chunks of a prompt, 2 frames each.
            await pair.answer(make_request(48, LONG))
        await pair.until_idle()
        assert virtual_loop().time() - began < 2.5

    on_pair(script, transfer={"rpc_timeout_s": 2.0})


@pytest.mark.parametrize("num_steps", range(4))
def test_an_abort_finds_a_request_between_its_commit_and_its_batch(num_steps):
    """Its KV is all there, its hand-off over, and no step has it yet."""

    async def script(pair: Pair) -> None:
        pair.decode.submit(make_request(4, replace(LONG, max_tokens=100), "running", router_id="router-1"))
        engine = pair.decode.engine
        await asyncio.sleep(0.01)
        await pair.hand_over(make_request(8, LONG))
        await pair.until(lambda: any(r.handed_over for r in engine.scheduler.waiting))
        for _ in range(num_steps):
            await asyncio.sleep(0.0005)
        pair.decode.abort("r")
        assert set(engine.requests) == {"running"}
        await pair.until(lambda: pair.outputs.get("running", [None])[-1].finish_reason, within_s=30.0)  # type: ignore[union-attr]
        assert "r" not in pair.outputs

    on_pair(script, step_s=lambda batch: 0.05)


def test_prompts_that_wait_for_their_turn_for_many_leases_are_all_answered():
    """The time in prefill's queue is not decode's to limit."""

    async def script(pair: Pair) -> None:
        requests = [make_request(prompt_of(16, seed), request_id=f"r{seed}") for seed in range(8)]
        answers = await asyncio.gather(*(pair.answer(request) for request in requests))
        assert virtual_loop().time() > 4 * LEASE_S
        assert answers == [expected_tokens(request.prompt_token_ids, GREEDY) for request in requests]

    on_pair(script, step_s=lambda batch: LEASE_S * (0.6 if batch.num_tokens > 8 else 0.001))


@pytest.mark.parametrize("room", [1, 3, 8])
def test_as_many_hand_offs_are_in_flight_as_the_setting_says_whatever_else_runs(room):
    async def script(pair: Pair) -> None:
        for seed in range(4):
            running = make_request(prompt_of(8, 100 + seed), replace(LONG, max_tokens=100), f"running {seed}")
            running.router_id = "router-1"
            pair.decode.submit(running)
        await asyncio.sleep(0.1)
        grants = [pair.reserve(make_request(prompt_of(8, seed), request_id=f"r{seed}")) for seed in range(room)]
        with pytest.raises(KVFerryError, match=rf"{room} hand-offs are under way.*transfer\.max_num_grants"):
            pair.reserve(make_request(8, request_id="one more"))
        assert len({grant.grant_id for grant in grants}) == room
        for seed in range(room):
            pair.decode.abort(f"r{seed}")
        for seed in range(4):
            pair.decode.abort(f"running {seed}")

    on_pair(script, num_gpu_blocks_override=128, max_num_seqs=4, transfer={"max_num_grants": room})
