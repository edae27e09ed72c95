"""Routers that die under our client: it goes on with the next one, and its caller notices nothing but the time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from cluster.client import Chunk, Completion
from cluster.records import Options
from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import drop
from tests.cluster.served import Served, served
from tests.factories import LEASE_S, prompt_of
from tests.fake_model import expected, expected_choices
from workers.errors import DeadlineError, InvalidRequestError, UnavailableError
from workers.request import FinishReason, SamplingParams

CHAT = [{"role": "user", "content": "Hi"}]
SEEDED: Options = {"max_tokens": 60, "seed": 7, "ignore_eos": True}
KINDS: dict[str, Options] = {
    "greedy": {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True},
    "seeded": SEEDED,
    "seed of the request id": {"max_tokens": 60, "request_id": "mine"},
    "stop string": {"max_tokens": 60, "seed": 7, "stop": ["zzz", "O2"], "ignore_eos": True},
    "three choices": {"max_tokens": 40, "seed": 7, "n": 3},
}
PROMPTS = {"ids": prompt_of(20), "text": "Once upon a time", "chat": CHAT}


def without_times(completion: Completion) -> Completion:
    """What must be equal, whoever gave it."""
    choices = tuple(without_times(choice) for choice in completion.choices)
    nothing = replace(completion, request_id="", choices=choices, ttft_s=0.0, tpot_s=0.0)
    return replace(nothing, timeline=type(completion.timeline)())


async def tokens_until(served: Served, count: int) -> None:
    while not any(  # noqa: ASYNC110  What is waited for is another side's doing.
        request.num_output_tokens >= count
        for worker in served.cluster.alive().values()
        for request in worker.engine.sequences()
    ):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_an_answer_whose_router_dies_again_and_again_is_the_same(options, prompt):
    async def main() -> None:
        async with served() as cluster:
            wanted = await cluster.ask(prompt, options)
            found = await cluster.ask(prompt, options, kill_at=(1, 2, 7, 30))
            assert cluster.num_routers > 3
            assert without_times(found) == without_times(wanted)

    run(main())


def test_what_goes_on_is_what_a_model_without_a_cache_says():
    async def main() -> None:
        async with served() as cluster:
            params = SamplingParams(seed=7, max_tokens=60, ignore_eos=True)
            one = await cluster.ask(prompt_of(20), SEEDED, kill_at=(5,))
            assert (list(one.token_ids), one.finish_reason) == expected(prompt_of(20), params)
            assert one.usage.num_completion_tokens == 60
            three = await cluster.ask(prompt_of(20), {**SEEDED, "n": 3}, kill_at=(40,))
            found = {at: list(choice.token_ids) for at, choice in enumerate(three.choices)}
            assert found == expected_choices(prompt_of(20), replace(params, n=3))

    run(main())


def test_the_next_router_computes_no_token_again_and_no_choice_that_had_ended():
    async def main() -> None:
        async with served() as cluster:
            wanted = expected_choices(prompt_of(20), SamplingParams(seed=7, max_tokens=60, ignore_eos=True, n=3))
            options: Options = {**SEEDED, "n": 3, "stop_token_ids": [wanted[1][5]]}
            await cluster.ask(prompt_of(20), options, kill_at=(90,))
            (request,) = cluster.live.requests
            held = {choice: list(tokens.token_ids) for choice, tokens in request.output_token_ids.items()}
            assert 1 not in held
            assert held == {choice: wanted[choice][: len(tokens)] for choice, tokens in held.items()}
            assert all(len(tokens) > 30 for tokens in held.values())
            assert cluster.live.router.num_running == 0

    run(main())


@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.002, 0.01])
def test_a_request_whose_router_dies_before_its_first_piece_is_sent_again_with_its_id(after_s):
    async def main() -> None:
        async with served(max_num_batched_tokens=16) as cluster:
            await cluster.client.status()
            asking = asyncio.create_task(cluster.ask(prompt_of(60), {"max_tokens": 20}))
            await asyncio.sleep(after_s)
            sent = list(cluster.live.requests)
            await cluster.kill_router(1.0)
            found = await asking
            (request,) = cluster.live.requests
            assert not request.output_token_ids
            assert all(one.request_id == request.request_id for one in sent)
            again = await cluster.ask(prompt_of(60), {"max_tokens": 20, "request_id": request.request_id})
            assert found.token_ids == again.token_ids

    run(main())


def test_a_router_and_its_decode_worker_that_die_together_cost_no_token():
    async def main() -> None:
        async with served() as cluster:
            params = SamplingParams(seed=7, max_tokens=60, ignore_eos=True)
            asking = asyncio.create_task(cluster.ask(prompt_of(20), SEEDED))
            await tokens_until(cluster, 10)
            await cluster.cluster.kill("d0")
            await cluster.kill_router(1.0)
            assert list((await asking).token_ids) == expected(prompt_of(20), params)[0]
            await cluster.cluster.replace("d0")

    run(main())


@pytest.mark.parametrize("num_pieces", [0, 1, 5])
def test_requests_of_a_dead_router_end_with_its_lease_and_not_before(num_pieces):
    async def main() -> None:
        # An answer takes longer than a lease, and so does a prompt.
        async with served(step_s=lambda batch: 0.3 if num_pieces else 2.0) as cluster:
            stream = cluster.client.stream(prompt_of(100), temperature=0.0, max_tokens=50, ignore_eos=True)
            reading = asyncio.create_task(read(stream, num_pieces))
            workers = cluster.cluster.workers
            await (reading if num_pieces else asyncio.sleep(3.0))
            await cluster.live.kill()
            reading.cancel()
            killed_s = virtual_loop().time()
            # What nobody waits for is not computed; what is decoded might be heard of again.
            await asyncio.sleep(1.0)
            assert bool(workers["d0"].engine.requests) is (num_pieces > 0)
            while any(worker.engine.requests for worker in workers.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            passed_s = virtual_loop().time() - killed_s
            assert (LEASE_S if num_pieces else 0.0) <= passed_s <= LEASE_S + 2.1
            await cluster.launch()
            await stream.aclose()

    run(main())


async def read(stream: AsyncGenerator[Chunk], count: int) -> None:
    """So many pieces, or to the end."""
    while count != 1:
        await anext(stream)
        count -= 1
    await anext(stream)


def test_without_another_router_the_error_is_typed_and_comes_within_a_bound():
    async def main() -> None:
        async with served() as cluster:
            for options, at_least_s, at_most_s in ((SEEDED, 25.0, 30.0), ({**SEEDED, "timeout_s": 4.0}, 2.9, 4.0)):
                stream = cluster.client.stream(prompt_of(20), **options)
                await anext(stream)
                await cluster.live.kill()
                killed_s = virtual_loop().time()
                with pytest.raises(UnavailableError, match=r"no router answers at router:8001"):
                    [chunk async for chunk in stream]
                assert at_least_s < virtual_loop().time() - killed_s <= at_most_s
                await cluster.launch()

    run(main())


def test_a_client_that_never_met_a_router_is_told_at_once():
    async def main() -> None:
        async with served() as cluster:
            await cluster.live.kill()
            with pytest.raises(UnavailableError, match="no router answers at router:8001; start one"):
                await cluster.client.generate("hi", max_tokens=4)
            assert virtual_loop().time() < 0.1
            await cluster.launch()

    run(main())


def test_what_a_router_refuses_is_not_sent_again_and_what_it_cannot_serve_now_is():
    async def main() -> None:
        async with served(router={"worker_wait_s": 1.0}) as cluster:
            with pytest.raises(InvalidRequestError):
                await cluster.client.generate(prompt_of(20), max_tokens=1000)
            assert len(cluster.live.requests) == 1
            await cluster.cluster.kill("p0")
            asking = asyncio.create_task(cluster.client.generate(prompt_of(20), **SEEDED))
            await asyncio.sleep(8.0)
            assert len(cluster.live.requests) > 2
            await cluster.cluster.replace("p0")
            assert (await asking).finish_reason is FinishReason.LENGTH

    run(main())


def test_a_time_out_of_the_callers_is_not_waited_out_twice():
    async def main() -> None:
        async with served(idle_within_s=12.0) as cluster:
            await cluster.client.status()
            fault = cluster.cluster.network.fault("Prefill", drop)
            with pytest.raises(DeadlineError):
                await cluster.client.generate(prompt_of(20), timeout_s=3.0)
            assert virtual_loop().time() == pytest.approx(3.0, abs=0.1)
            fault.remove()

    run(main())
