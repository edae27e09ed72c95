"""Law 2 on the real model in fp32: transformers, colocated and 1P1D over gRPC give the same token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from cluster.client import AsyncClient, Completion, Sampling
from tests.e2e.clusters import Running
from tests.exact import Comparator
from tests.oracle import TransformersOracle
from tests.prompts import chat, questions, token_ids
from workers.request import FinishReason, SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

# Prompts, and the most tokens of each answer.
sizes = pytest.mark.parametrize(
    ("num_prompts", "max_tokens"), [(8, 32), pytest.param(40, 64, marks=pytest.mark.slow)], ids=["8x32", "40x64"]
)
Greedy = Callable[[int, int], list[list[int]]]


@pytest.fixture(scope="session")
def transformers_greedy(oracle: TransformersOracle) -> Greedy:
    """(a): each size is computed once."""
    answers: dict[tuple[int, int], list[list[int]]] = {}

    def greedy(num_prompts: int, max_tokens: int) -> list[list[int]]:
        key = (num_prompts, max_tokens)
        if key not in answers:
            answers[key] = [oracle.greedy(token_ids(question), max_tokens) for question in questions(num_prompts)]
        return answers[key]

    return greedy


def ask(running: Running, asked: Sequence[str], samplings: Sequence[Sampling], in_flight: int) -> list[Completion]:
    """Chats, at most `in_flight` at once."""

    async def run() -> list[Completion]:
        gate = asyncio.Semaphore(in_flight)

        async def one(client: AsyncClient, question: str, sampling: Sampling) -> Completion:
            async with gate:
                return await client.generate(chat(question), **sampling)

        async with AsyncClient(running.grpc) as client:
            return await asyncio.gather(*(one(client, *pair) for pair in zip(asked, samplings, strict=True)))

    return asyncio.run(run())


def require_same(
    comparator: Comparator,
    asked: Sequence[str],
    samplings: Sequence[Sampling],
    completions: Sequence[Completion],
    references: Sequence[Sequence[int]] | None = None,
) -> None:
    for i, (question, sampling, completion) in enumerate(zip(asked, samplings, completions, strict=True)):
        prompt = token_ids(question)
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        comparator.require_same(prompt, params, completion.token_ids, references[i] if references else None)
        assert completion.usage.num_prompt_tokens == len(prompt)
        assert completion.usage.num_completion_tokens == len(completion.token_ids)
        ended = len(completion.token_ids) == params.max_tokens
        assert completion.finish_reason is (FinishReason.LENGTH if ended else FinishReason.STOP)


@sizes
@pytest.mark.parametrize(
    ("cluster", "in_flight"),
    [("colocated", 8), ("one_p_one_d", 1), ("one_p_one_d", 8)],
    ids=["colocated", "1P1D", "1P1D-8-in-flight"],
)
def test_greedy_answers_are_those_of_transformers(
    cluster: str,
    in_flight: int,
    num_prompts: int,
    max_tokens: int,
    request: pytest.FixtureRequest,
    transformers_greedy: Greedy,
    comparator: Comparator,
):
    asked = questions(num_prompts)
    samplings = [Sampling(temperature=0.0, max_tokens=max_tokens)] * len(asked)
    expected = transformers_greedy(num_prompts, max_tokens)
    running: Running = request.getfixturevalue(cluster)
    completions = ask(running, asked, samplings, in_flight)
    require_same(comparator, asked, samplings, completions, expected)
    if cluster == "one_p_one_d" and in_flight > 1:
        assert running.stats()["decode"].max_num_running > 1


@sizes
def test_sampled_answers_are_the_oracles_colocated_and_disaggregated(
    num_prompts: int, max_tokens: int, one_p_one_d: Running, colocated: Running, comparator: Comparator
):
    asked = questions(num_prompts)
    samplings = [
        Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=1000 + i, max_tokens=max_tokens) for i in range(len(asked))
    ]
    together = ask(colocated, asked, samplings, 8)
    require_same(comparator, asked, samplings, together)
    apart = ask(one_p_one_d, asked, samplings, 8)
    require_same(comparator, asked, samplings, apart, [completion.token_ids for completion in together])
    greedy = ask(one_p_one_d, asked[:1], [Sampling(temperature=0.0, max_tokens=max_tokens)], 1)
    assert greedy[0].token_ids != apart[0].token_ids, "the seed chose nothing"


def test_each_of_several_choices_is_the_oracles(one_p_one_d: Running, comparator: Comparator):
    question = questions(1)[0]
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=1000, max_tokens=16)
    (completion,) = ask(one_p_one_d, [question], [sampling | {"n": 3}], 1)
    assert len({choice.token_ids for choice in completion.choices}) == 3
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    for index, choice in enumerate(completion.choices):
        comparator.require_same(token_ids(question), params, choice.token_ids, choice=index)
