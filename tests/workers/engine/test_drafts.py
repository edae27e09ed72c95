"""Prompt lookup: the proposals against a naive search, and answers of which drafts change nothing but the steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.sim.loop import run
from tests.checkpoints import write_folder
from tests.factories import GREEDY, SEEDED, make_engine, make_request, prompt_of, run_engine, runner_of, tokens_of
from tests.fake_model import EOS, expected, expected_tokens
from workers.config import EngineConfig, SpeculativeConfig
from workers.engine.drafts import propose
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.model_runner import ModelRunner
from workers.request import FinishReason, Request, SamplingParams, TokenOutput

NGRAM = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
LONG = replace(GREEDY, max_tokens=40)


@pytest.fixture(autouse=True)
def three_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary so small that what followed once follows again in one case of three."""
    monkeypatch.setattr("tests.fake_model.VOCAB_SIZE", 3)


def naive(tokens: Sequence[int], config: SpeculativeConfig) -> list[int]:
    for size in range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1):
        end = list(tokens[-size:])
        starts = [at for at in range(len(tokens) - size) if list(tokens[at : at + size]) == end and len(end) == size]
        full = [at for at in starts if at + size + config.num_speculative_tokens <= len(tokens)]
        if starts:
            at = (full or starts)[-1]
            return list(tokens[at + size : at + size + config.num_speculative_tokens])
    return []


@given(
    st.lists(st.sampled_from([0, 1, 256, 65536, 2**31 - 1]), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_proposals_are_those_of_a_naive_search(tokens, most, least, more):
    config = SpeculativeConfig(num_speculative_tokens=most, prompt_lookup_min=least, prompt_lookup_max=least + more)
    assert propose(tokens, config) == naive(tokens, config)


def test_a_run_of_one_token_is_continued():
    assert propose([7] * 10, NGRAM) == [7, 7, 7]


def test_a_range_that_is_none_is_refused():
    with pytest.raises(ValidationError, match="prompt_lookup_min"):
        SpeculativeConfig(prompt_lookup_min=5, prompt_lookup_max=4)


def speculating(**settings: Any) -> Engine:
    return make_engine(speculative_config=NGRAM, **settings)


def answers(engine: Engine, *requests: Request) -> dict[str, list[TokenOutput]]:
    async def main() -> dict[str, list[TokenOutput]]:
        for request in requests:
            engine.add(request)
        return await run_engine(engine)

    return run(main())


@pytest.mark.parametrize("params", [LONG, replace(SEEDED, max_tokens=40)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("caching", [False, True])
def test_answers_are_the_same_in_fewer_steps(params, caching):
    engine = speculating(enable_prefix_caching=caching)
    requests = [make_request(length, params, f"r{length}") for length in (1, 4, 9, 30)]
    for name, outputs in answers(engine, *requests).items():
        prompt = prompt_of(int(name[1:]))
        assert tokens_of(outputs) == expected_tokens(prompt, params)
        assert len(outputs) < 40
    assert 0 < engine.num_accepted_tokens < engine.num_draft_tokens
    assert engine.num_output_tokens == 160
    limit = engine.scheduler.config.max_num_batched_tokens
    assert all(sum(num_tokens for _, _, num_tokens in step) <= limit for step in runner_of(engine).steps)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_token_comes_after_the_last(max_tokens):
    params = replace(GREEDY, max_tokens=max_tokens)
    for length in range(1, 12):
        outputs = answers(speculating(), make_request(length, params))["r"]
        assert tokens_of(outputs) == expected_tokens(prompt_of(length), params)
        assert [output.finish_reason for output in outputs][-1] is FinishReason.LENGTH
    assert EOS == 0


def test_a_token_that_ends_the_answer_ends_it_among_right_drafts_too():
    params = SamplingParams(temperature=0.0, max_tokens=60)
    ended_inside = 0
    for seed in range(60):
        prompt = prompt_of(8, seed)
        wanted, reason = expected(prompt, params)
        engine = speculating()
        outputs = answers(engine, make_request(prompt, params))["r"]
        assert tokens_of(outputs) == wanted
        assert outputs[-1].finish_reason is reason
        assert engine.num_output_tokens == len(wanted)
        ended_inside += len(outputs[-1].token_ids) > 1
    assert ended_inside


def test_drafts_take_no_block_that_another_needs():
    """A pool in which the requests preempt each other: with and without drafts equally often, and no wrong token."""
    for seed in range(10):
        engine = speculating(num_gpu_blocks_override=20, max_model_len=80)
        requests = [make_request(prompt_of(12, seed * 10 + i), LONG, f"r{i}") for i in range(4)]
        found = answers(engine, *requests)
        for i in range(4):
            assert tokens_of(found[f"r{i}"]) == expected_tokens(prompt_of(12, seed * 10 + i), LONG)
        assert engine.scheduler.num_preemptions
        assert engine.num_accepted_tokens


def test_prompts_come_before_drafts():
    engine = speculating(max_num_batched_tokens=8, max_num_seqs=8, max_model_len=400, num_gpu_blocks_override=200)

    async def main() -> None:
        engine.add(make_request(4, replace(LONG, max_tokens=100), "decoding"))
        for _ in range(10):
            await engine.step()
        engine.add(make_request(70, LONG, "prompt"))
        steps = runner_of(engine).steps
        first = len(steps)
        while not any(r.request_id == "prompt" and r.output_token_ids for r in engine.scheduler.running):
            await engine.step()
        # One token to who decodes, the other seven to the prompt.
        assert len(steps) - first == 10
        await run_engine(engine)

    run(main())


def test_aborts_at_any_moment_leave_nothing():
    async def main(seed: int) -> None:
        rng = random.Random(seed)
        engine = speculating(num_gpu_blocks_override=24, max_model_len=90)
        for i in range(8):
            engine.add(make_request(prompt_of(rng.randrange(1, 30), i), LONG, f"r{i}"))
        while engine.has_work:
            step = asyncio.create_task(engine.step())
            await asyncio.sleep(rng.uniform(0, 0.01))
            if rng.random() < 0.3:
                engine.abort(f"r{rng.randrange(8)}")
            await step
            engine.check_integrity()
        assert engine.block_manager.num_free == engine.block_manager.num_blocks

    for seed in range(20):
        run(main(seed))


# The real model has 256 tokens and random weights; with this it says few of them, and so repeats itself.
FEW = tuple((token_id, 14.0) for token_id in range(3, 7))
PROMPT = [*range(3, 23)] * 3
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=5),
    "penalties": SamplingParams(
        temperature=0.8, seed=3, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.8
    ),
    "min_tokens": SamplingParams(temperature=1.5, seed=2, min_tokens=30, logit_bias=((2, 16.0),)),
    "stop": SamplingParams(temperature=0.3, seed=9, stop_token_ids=(6,)),
    "logprobs": SamplingParams(temperature=0.2, seed=4, logprobs=3, prompt_logprobs=2),
}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder: Path = write_folder(tmp_path_factory.mktemp("tiny"))
    made = Executor(ModelRunner(EngineConfig(model=str(folder), num_gpu_blocks_override=64, max_model_len=256)))
    yield made
    made.close()


def on_real_model(
    executor: Executor, speculative: SpeculativeConfig | None
) -> tuple[dict[str, list[TokenOutput]], Engine]:
    config = EngineConfig(num_gpu_blocks_override=64, max_model_len=256, speculative_config=speculative)
    engine = Engine(executor, config, config)

    async def main() -> dict[str, list[TokenOutput]]:
        for name, params in SETTINGS.items():
            engine.add(Request(name, list(PROMPT), replace(params, max_tokens=48, logit_bias=FEW + params.logit_bias)))
        return await run_engine(engine)

    return asyncio.run(main()), engine


def test_the_real_model_says_the_same_with_every_setting(executor):
    plain, _ = on_real_model(executor, None)
    drafted, engine = on_real_model(executor, SpeculativeConfig(prompt_lookup_min=1))
    assert engine.num_accepted_tokens > 10
    for name in SETTINGS:
        assert tokens_of(drafted[name]) == tokens_of(plain[name]), name
        assert drafted[name][-1].finish_reason is plain[name][-1].finish_reason
    assert plain["stop"][-1].finish_reason is FinishReason.STOP
    for mine, wanted in zip(logprobs_of(drafted["logprobs"]), logprobs_of(plain["logprobs"]), strict=True):
        assert mine.top_token_ids == wanted.top_token_ids
        assert mine.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def logprobs_of(outputs: Sequence[TokenOutput]):
    return [one for output in outputs for one in (*output.prompt_logprobs, *output.logprobs)]
