"""Several choices of one request: each is answered as if it were alone, and no block is written by two of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run
from tests.factories import (
    BLOCK_SIZE,
    GREEDY,
    SEEDED,
    by_choice,
    make_engine,
    make_request,
    prompt_of,
    run_engine,
    runner_of,
)
from tests.fake_model import expected, expected_choices, expected_tokens
from workers.engine.engine import Engine
from workers.engine.scheduler import SchedulerOutput
from workers.request import FinishReason, Request, TokenOutput

LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 15, 16, 17, 50]
THREE = replace(SEEDED, n=3)


def require_idle(engine: Engine) -> None:
    engine.check_integrity()
    assert not engine.requests
    assert engine.block_manager.num_free + engine.block_manager.num_cached == engine.block_manager.num_blocks


def answers(engine: Engine, *requests: Request) -> dict[str, dict[int, list[int]]]:
    async def main() -> dict[str, dict[int, list[int]]]:
        for request in requests:
            engine.add(request)
        outputs = await run_engine(engine)
        require_idle(engine)
        return {request_id: by_choice(found) for request_id, found in outputs.items()}

    return run(main())


def refuse_shared_writes(engine: Engine) -> list[tuple[int, int]]:
    """From now on a step that writes a block for two sequences fails; the copies that steps make."""
    runner = runner_of(engine)
    copies: list[tuple[int, int]] = []
    execute = runner.execute

    def checked(batch: SchedulerOutput) -> Any:
        written = Counter(
            block
            for r in batch.requests
            for block in set(r.block_table[r.start // BLOCK_SIZE : -(-(r.start + len(r.token_ids)) // BLOCK_SIZE)])
        )
        assert all(count == 1 for count in written.values()), "a block is written for two sequences"
        assert {target for _, target in batch.copies} <= set(written), "a copy is made for nobody in the step"
        copies.extend(batch.copies)
        return execute(batch)

    runner.execute = checked  # type: ignore[method-assign]
    return copies


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_choice_is_answered_as_if_it_were_alone(length, caching):
    engine = make_engine(enable_prefix_caching=caching)
    copies = refuse_shared_writes(engine)
    found = answers(engine, make_request(length, THREE))["r"]
    assert found == expected_choices(prompt_of(length), THREE)
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    # The prompt is computed once, and its last block copied where it is not full.
    assert engine.num_prompt_tokens_computed == length
    assert len(copies) == (2 if length % BLOCK_SIZE else 0)
    for choice, tokens in found.items():
        alone = make_request(length, replace(SEEDED, n=1), choice=choice)
        assert answers(engine, alone) == {"r": {choice: tokens}}


def test_greedy_choices_are_all_the_same():
    params = replace(GREEDY, n=2)
    assert answers(make_engine(), make_request(6, params))["r"] == dict.fromkeys(
        (0, 1), expected_tokens(prompt_of(6), GREEDY)
    )


def test_one_choice_can_go_on_alone_from_the_tokens_that_it_has():
    whole = expected_tokens(prompt_of(6), SEEDED, 2)
    request = make_request(6, SEEDED, choice=2, output_token_ids=whole[:3])
    (outputs,) = run(_outputs(make_engine(), request)).values()
    assert [(o.choice, o.index, o.token_ids) for o in outputs] == [(2, i, (whole[i],)) for i in range(3, 8)]


async def _outputs(engine: Engine, *requests: Request) -> dict[str, list[TokenOutput]]:
    for request in requests:
        engine.add(request)
    return await run_engine(engine)


@pytest.mark.parametrize("length", [7, 8])
def test_a_choice_that_token_1_finishes_goes_no_further_than_that(length):
    first = expected_tokens(prompt_of(length), SEEDED, 1)[0]
    params = replace(THREE, stop_token_ids=(first,))
    outputs = run(_outputs(make_engine(), make_request(length, params)))["r"]
    assert by_choice(outputs) == expected_choices(prompt_of(length), params)
    reasons = {o.choice: o.finish_reason for o in outputs if o.finish_reason}
    assert reasons == {choice: expected(prompt_of(length), params, choice)[1] for choice in range(3)}
    assert reasons[1] is FinishReason.STOP


def test_with_one_token_wanted_nothing_is_copied():
    params, engine = replace(THREE, max_tokens=1), make_engine()
    copies = refuse_shared_writes(engine)
    assert answers(engine, make_request(10, params))["r"] == expected_choices(prompt_of(10), params)
    assert (copies, engine.num_steps) == ([], 1)


def test_a_prefill_workers_request_gives_token_1_of_every_choice_and_keeps_its_blocks():
    async def main() -> None:
        engine = make_engine()
        request = make_request(10, THREE, output_limit=1, hold_blocks=True)
        engine.add(request)
        outputs = await engine.step()
        assert [(o.choice, o.index, *o.token_ids) for o in outputs] == [
            (choice, 0, tokens[0]) for choice, tokens in expected_choices(prompt_of(10), THREE).items()
        ]
        assert not any(o.finish_reason for o in outputs)
        assert all(o.timeline for o in outputs)
        assert (len(engine.blocks_in_use()), engine.has_work) == (3, False)
        engine.release(request)
        require_idle(engine)

    run(main())


def test_what_is_known_of_the_prompt_comes_with_each_choice():
    async def main() -> None:
        engine = make_engine(enable_prefix_caching=True)
        await _outputs(engine, make_request(10, GREEDY, "first"))
        outputs = (await _outputs(engine, make_request(10, THREE)))["r"]
        assert [o.num_cached_tokens for o in outputs if o.index == 0] == [8, 8, 8]

    run(main())


def test_choices_without_a_seat_wait_with_their_blocks():
    engine = make_engine(max_num_seqs=1)
    copies = refuse_shared_writes(engine)
    other = make_request(prompt_of(5, seed=1), GREEDY, "other")
    found = answers(engine, make_request(10, THREE), other)
    assert found == {
        "r": expected_choices(prompt_of(10), THREE),
        "other": {0: expected_tokens(prompt_of(5, seed=1), GREEDY)},
    }
    assert (len(copies), engine.scheduler.num_preemptions) == (2, 0)


def test_a_choice_that_lacks_the_blocks_of_those_that_wait_gives_its_seat_to_them():
    params = replace(SEEDED, n=2, max_tokens=41)
    engine = make_engine(max_num_seqs=1, num_gpu_blocks_override=12, max_model_len=48)
    assert answers(engine, make_request(7, params))["r"] == expected_choices(prompt_of(7), params)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [15, 16])
def test_choices_that_run_out_of_blocks_are_preempted_one_by_one(length, caching):
    params = replace(THREE, max_tokens=30)
    engine = make_engine(num_gpu_blocks_override=12, max_model_len=48, enable_prefix_caching=caching)
    assert answers(engine, make_request(length, params))["r"] == expected_choices(prompt_of(length), params)
    assert engine.scheduler.num_preemptions > 0


def test_a_choice_that_finds_no_block_when_the_prompt_is_computed_computes_it_again():
    engine = make_engine(num_gpu_blocks_override=5, max_model_len=20)
    params = replace(THREE, max_tokens=2)
    assert answers(engine, make_request(17, params))["r"] == expected_choices(prompt_of(17), params)
    assert engine.num_prompt_tokens_computed == 3 * 17


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("length", [15, 16])
def test_an_abort_at_any_step_ends_every_choice_and_leaves_nothing(length, in_step):
    async def main() -> None:
        for num_steps in range(10):
            engine = make_engine(max_num_seqs=2)
            engine.add(make_request(length, THREE))
            for _ in range(num_steps):
                await engine.step()
            step = asyncio.create_task(engine.step()) if in_step else None
            await asyncio.sleep(0.001)
            engine.check_integrity()
            assert engine.abort("r")
            engine.check_integrity()
            assert not step or await step == []
            assert not engine.has_work
            require_idle(engine)

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_groups_and_aborts_in_a_small_pool_in_any_order_give_right_answers_and_leak_nothing(seed):
    rng = random.Random(seed)

    async def main() -> None:
        engine = make_engine(
            num_gpu_blocks_override=14,
            max_model_len=56,
            max_num_seqs=rng.choice((1, 3, 5)),
            enable_prefix_caching=seed % 2,
        )
        refuse_shared_writes(engine)
        requests = [_arbitrary(rng, i) for i in range(12)]
        got: dict[str, list[TokenOutput]] = {r.request_id: [] for r in requests}
        aborted = set()

        async def come_and_go() -> None:
            for request in requests:
                await asyncio.sleep(rng.uniform(0, 0.02))
                engine.add(request)
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.uniform(0, 0.05))
                    victim = rng.choice(requests).request_id
                    if engine.abort(victim):
                        aborted.add(victim)

        coming = asyncio.create_task(come_and_go())
        while not coming.done() or engine.has_work:
            if engine.has_work:
                for output in await engine.step():
                    got[output.request_id].append(output)
                engine.check_integrity()
            else:
                await asyncio.sleep(0.001)
        require_idle(engine)
        for request in requests:
            require_answers(request, got[request.request_id], whole=request.request_id not in aborted)

    run(main())


def require_answers(request: Request, outputs: list[TokenOutput], *, whole: bool) -> None:
    found, wanted = by_choice(outputs), expected_choices(request.prompt_token_ids, request.params)
    if not whole:
        wanted = {choice: wanted[choice][: len(tokens)] for choice, tokens in found.items()}
    assert found == wanted


def _arbitrary(rng: random.Random, number: int) -> Request:
    params = replace(rng.choice((GREEDY, SEEDED)), n=rng.choice((1, 2, 3)), max_tokens=rng.randint(1, 20))
    # Some prompts begin alike.
    prompt = prompt_of(8, rng.choice((0, number))) + prompt_of(rng.randint(0, 22), number)
    return make_request(prompt, params, f"r{number}")
