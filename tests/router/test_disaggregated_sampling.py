"""Law 2 for every sampling parameter: one prefill and one decode worker answer as one colocated worker does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from router.config import RouterConfig
from router.pool import WorkerPool
from router.router import Router
from tests.checkpoints import write_folder
from tests.factories import by_choice
from workers.config import Role, WorkerConfig
from workers.errors import UnavailableError
from workers.request import SamplingParams, TokenLogprobs, TokenOutput
from workers.rpc import GrpcNetwork
from workers.worker import Worker

EOS = 2
rng = random.Random(1)
PROMPT = [rng.randrange(3, 256) for _ in range(90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def cluster(folder: Path, roles: Sequence[Role]) -> AsyncIterator[tuple[Router, dict[str, Worker]]]:
    workers: dict[str, Worker] = {
        role: Worker(
            WorkerConfig(
                model=str(folder),
                name=role,
                role=role,
                num_gpu_blocks_override=128,
                max_model_len=256,
                max_num_batched_tokens=64,
                num_threads=1,
            )
        )
        for role in roles
    }
    addresses = [await worker.start() for worker in workers.values()]
    config = RouterConfig(heartbeat_s=0.1)
    pool = WorkerPool(addresses, "router-1", config, GrpcNetwork())
    await pool.start()
    router = Router(pool, config, "router-1")
    try:
        yield router, workers
        for worker in workers.values():
            async with asyncio.timeout(5):
                while len(worker.engine.blocks_in_use()) or worker.engine.scheduler.num_blocks_reserved:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            worker.engine.check_integrity()
    finally:
        await router.stop()
        await pool.stop()
        for worker in workers.values():
            await worker.stop()


async def ask(
    router: Router, prompt: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str = ""
) -> list[TokenOutput]:
    async with aclosing(router.generate(prompt, params, request_id, cache_salt)) as outputs:
        return [output async for output in outputs]


async def ask_all(router: Router, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[list[TokenOutput]]:
    return await asyncio.gather(*(ask(router, *request, f"r{i}") for i, request in enumerate(requests)))


def random_request(i: int) -> tuple[list[int], SamplingParams]:
    rng = random.Random(i)
    return PROMPT[: rng.randint(1, 90)], SamplingParams(
        temperature=rng.choice([0.0, 0.8, 1.4]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 30]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 1.0]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        logit_bias=rng.choice([(), ((EOS, 9.0), (8, 2.0))]),
        stop_token_ids=rng.choice([(), (8,)]),
        min_tokens=rng.choice([0, 1, 2, 9]),
        logprobs=rng.choice([None, 0, 4]),
        prompt_logprobs=rng.choice([None, 0, 3]),
        seed=i,
        max_tokens=12,
    )


def require_same_scores(some: Sequence[TokenLogprobs], others: Sequence[TokenLogprobs]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.token_id == other.token_id
        # Rounding may swap neighbours.
        assert abs(one.rank - other.rank) <= 1
        assert (one.logprob, *one.top_logprobs) == pytest.approx((other.logprob, *other.top_logprobs), abs=1e-4)


def test_disaggregated_is_colocated_for_every_parameter(folder: Path) -> None:
    requests = [random_request(i) for i in range(40)]

    async def run(roles: Sequence[Role]) -> list[list[TokenOutput]]:
        async with cluster(folder, roles) as (router, workers):
            answers = await ask_all(router, requests)
            if "decode" in workers:
                assert workers["decode"].engine.num_prompt_tokens_computed == 0
            return answers

    together, apart = asyncio.run(run(["colocated"])), asyncio.run(run(["prefill", "decode"]))
    num_early_stops = 0
    for (prompt, params), one, other in zip(requests, together, apart, strict=True):
        tokens = [token_id for output in one for token_id in output.token_ids]
        assert tokens == [token_id for output in other for token_id in output.token_ids]
        assert one[-1].finish_reason is other[-1].finish_reason
        num_early_stops += 2 <= len(tokens) < 12
        for answer in (one, other):
            assert len(tokens) >= params.min_tokens
            scores = [score for output in answer for score in output.logprobs]
            assert [score.token_id for score in scores] == ([] if params.logprobs is None else tokens)
            prompt_scores = [score.token_id for score in answer[0].prompt_logprobs]
            assert prompt_scores == ([] if params.prompt_logprobs is None else prompt[1:])
        require_same_scores(*([score for output in answer for score in output.logprobs] for answer in (one, other)))
        require_same_scores(one[0].prompt_logprobs, other[0].prompt_logprobs)
    assert num_early_stops > 3


@pytest.mark.parametrize("roles", [["colocated"], ["prefill", "decode"]], ids="-".join)
def test_cached_tokens_and_salts_in_both_shapes(folder: Path, roles: Sequence[Role]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)

    async def run() -> None:
        async with cluster(folder, roles) as (router, _):
            for i, (salt, cached) in enumerate([("", 0), ("", 80), ("a", 0), ("a", 80), ("b", 0)]):
                outputs = await ask(router, PROMPT, params, f"r{i}", salt)
                assert [output.num_cached_tokens for output in outputs] == [cached, 0, 0]
            scored = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
            first, *_ = await ask(router, PROMPT, scored, "scored")
            assert (first.num_cached_tokens, len(first.prompt_logprobs)) == (0, 89)

    asyncio.run(run())


@pytest.mark.parametrize("roles", [["colocated"], ["prefill", "decode"]], ids="-".join)
def test_a_resumed_answer_is_the_undisturbed_one_with_its_logprobs(folder: Path, roles: Sequence[Role]) -> None:
    requests = [random_request(i) for i in range(40, 56)]

    async def run(lose: bool) -> list[list[TokenOutput]]:
        async with cluster(folder, roles) as (router, workers):
            answers = asyncio.create_task(ask_all(router, requests))
            engine = workers[roles[-1]].engine
            while lose and not answers.done():
                await asyncio.sleep(0.001)
                if any(request.num_output_tokens > 3 for request in engine.sequences()):
                    workers[roles[-1]]._fail_all(UnavailableError("lost, says the test"))
                    lose = False
            assert not lose, "over before anything could be lost"
            return await answers

    whole, resumed = asyncio.run(run(lose=False)), asyncio.run(run(lose=True))
    for one, other in zip(whole, resumed, strict=True):
        assert [o.index for o in other] == list(range(len(other)))
        assert [o.token_ids for o in one] == [o.token_ids for o in other]
        require_same_scores(*([score for output in answer for score in output.logprobs] for answer in (one, other)))
        require_same_scores(*([s for output in answer for s in output.prompt_logprobs] for answer in (one, other)))


def test_several_choices_are_handed_over_as_they_are_computed_in_one_place(folder: Path) -> None:
    requests = [(prompt, replace(params, n=3)) for prompt, params in map(random_request, range(60, 70))]

    async def run(roles: Sequence[Role]) -> list[dict[int, list[int]]]:
        async with cluster(folder, roles) as (router, workers):
            answers = await ask_all(router, requests)
            if "decode" in workers:
                assert workers["decode"].engine.num_prompt_tokens_computed == 0
            for answer, (prompt, params) in zip(answers, requests, strict=True):
                wanted = [] if params.prompt_logprobs is None else prompt[1:]
                firsts = [output for output in answer if output.index == 0]
                assert [[one.token_id for one in output.prompt_logprobs] for output in firsts] == [wanted] * 3
            return [by_choice(answer) for answer in answers]

    together, apart = asyncio.run(run(["colocated"])), asyncio.run(run(["prefill", "decode"]))
    assert together == apart
    assert all(list(answer) == [0, 1, 2] for answer in apart)
    sampled = [answer for answer, (_, params) in zip(apart, requests, strict=True) if not params.greedy]
    assert any(answer[0] != answer[1] != answer[2] for answer in sampled)
