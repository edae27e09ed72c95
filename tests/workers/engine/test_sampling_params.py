"""Sampling parameters through the engine on a tiny random model; the oracle is transformers on the same weights."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.checkpoints import write_folder
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.model_runner import ModelRunner
from workers.request import FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
EOS = 2
rng = random.Random(0)
PROMPT = [rng.randrange(3, 256) for _ in range(50)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


@pytest.fixture(scope="module")
def runners(folder: Path) -> Iterator[dict[int, Executor]]:
    """By number of blocks: the model is loaded once for each."""
    made = {
        blocks: Executor(
            ModelRunner(EngineConfig(model=str(folder), num_gpu_blocks_override=blocks, max_model_len=128))
        )
        for blocks in (8, 256)
    }
    yield made
    for executor in made.values():
        executor.close()


def make_engine(runners: dict[int, Executor], num_blocks: int = 256, **settings: Any) -> Engine:
    config = EngineConfig(num_gpu_blocks_override=num_blocks, max_model_len=128, **settings)
    return Engine(runners[num_blocks], config, config)


def run(engine: Engine, *requests: Request, later: Sequence[Request] = ()) -> dict[str, list[TokenOutput]]:
    """All their outputs; `later` ones arrive when the others have begun to answer."""

    async def steps() -> dict[str, list[TokenOutput]]:
        for request in requests:
            engine.add(request)
        outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in (*requests, *later)}
        arriving = list(later)
        while engine.has_work:
            for output in await engine.step():
                outputs[output.request_id].append(output)
            engine.check_integrity()
            if all(outputs[request.request_id] for request in requests):
                while arriving:
                    engine.add(arriving.pop(0))
        return outputs

    return asyncio.run(steps())


def answer(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[TokenOutput]:
    return run(engine, Request("r", list(prompt), params))["r"]


def tokens_of(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def log_softmax(oracle: LlamaForCausalLM, token_ids: Sequence[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size]: of what follows each token."""
    with torch.inference_mode():
        scores: torch.Tensor = oracle(torch.tensor([token_ids])).logits[0].double().log_softmax(dim=-1)
    return scores


def require_scores(scores: Sequence[TokenLogprobs], token_ids: Sequence[int], want: torch.Tensor, num_top: int) -> None:
    assert [one.token_id for one in scores] == list(token_ids)
    for one, row in zip(scores, want, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        # transformers' order, as far as it is sure.
        assert one.rank == pytest.approx(1 + int((row > row[one.token_id]).sum()), abs=1)
        values, ids = row.topk(num_top)
        assert one.top_logprobs == pytest.approx(values.tolist(), abs=1e-4)
        assert len(one.top_token_ids) == num_top
        for ours, theirs in zip(one.top_token_ids, ids.tolist(), strict=True):
            assert ours == theirs or abs(float(row[ours] - row[theirs])) < 1e-4


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, logprobs=5),
        # What changes the choice does not change the model's own distribution.
        replace(GREEDY, temperature=1.5, seed=3, repetition_penalty=1.5, logit_bias=((9, 4.0),), min_p=0.1, logprobs=2),
        replace(GREEDY, logprobs=0),
    ],
)
def test_logprobs_are_those_of_transformers(
    params: SamplingParams, oracle: LlamaForCausalLM, runners: dict[int, Executor]
) -> None:
    outputs = answer(make_engine(runners), PROMPT, params)
    tokens = tokens_of(outputs)
    want = log_softmax(oracle, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    require_scores([one for output in outputs for one in output.logprobs], tokens, want, params.logprobs or 0)


def test_requests_that_want_none_get_none(runners: dict[int, Executor]) -> None:
    plain, asked = Request("plain", PROMPT, GREEDY), Request("asked", PROMPT, replace(GREEDY, logprobs=1))
    outputs = run(make_engine(runners), plain, asked)
    assert tokens_of(outputs["plain"]) == tokens_of(outputs["asked"])
    assert all(not o.logprobs and not o.prompt_logprobs for o in outputs["plain"])
    assert all(len(o.logprobs) == 1 and not o.prompt_logprobs for o in outputs["asked"])


@pytest.mark.parametrize("max_num_batched_tokens", [512, 16, 7])
@pytest.mark.parametrize("length", [1, 2, 16, 50])
def test_prompt_logprobs_are_those_of_transformers_in_chunks_or_not(
    length: int, max_num_batched_tokens: int, oracle: LlamaForCausalLM, runners: dict[int, Executor]
) -> None:
    engine = make_engine(runners, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=4)
    prompts = {"long": PROMPT[:length], "other": PROMPT[10:45]}
    requests = [Request(name, prompt, replace(GREEDY, prompt_logprobs=3)) for name, prompt in prompts.items()]
    outputs = run(engine, *requests, Request("plain", PROMPT[:30], GREEDY))
    for name, prompt in prompts.items():
        first, *others = outputs[name]
        require_scores(first.prompt_logprobs, prompt[1:], log_softmax(oracle, prompt)[:-1], 3)
        assert not any(output.prompt_logprobs for output in others)
        assert tokens_of(outputs[name]) == tokens_of(answer(make_engine(runners), prompt, GREEDY))


def test_a_cached_prefix_hides_no_prompt_logprobs(oracle: LlamaForCausalLM, runners: dict[int, Executor]) -> None:
    engine = make_engine(runners)
    assert answer(engine, PROMPT, GREEDY)[0].num_cached_tokens == 0
    assert answer(engine, PROMPT, GREEDY)[0].num_cached_tokens == 48
    first, *_ = answer(engine, PROMPT, replace(GREEDY, prompt_logprobs=1))
    assert first.num_cached_tokens == 0
    require_scores(first.prompt_logprobs, PROMPT[1:], log_softmax(oracle, PROMPT)[:-1], 1)
    assert answer(engine, PROMPT, GREEDY)[0].num_cached_tokens == 48


def test_cached_tokens_are_told_once_and_salts_share_nothing(runners: dict[int, Executor]) -> None:
    engine = make_engine(runners)
    for salt, cached in (("a", 0), ("a", 48), ("b", 0), ("", 0), ("b", 48)):
        outputs = run(engine, Request("r", PROMPT, GREEDY, cache_salt=salt))["r"]
        assert [output.num_cached_tokens for output in outputs] == [cached] + [0] * 7


def test_a_resumed_request_is_not_asked_for_its_prompt_again(runners: dict[int, Executor]) -> None:
    params = replace(GREEDY, prompt_logprobs=1, logprobs=1)
    engine = make_engine(runners)
    whole = answer(engine, PROMPT, params)
    resumed = Request("r", PROMPT, params, output_token_ids=tokens_of(whole)[:3])
    rest = run(engine, resumed)["r"]
    assert resumed.num_cached_tokens == 48
    assert tokens_of(rest) == tokens_of(whole)[3:]
    assert not any(output.prompt_logprobs for output in rest)
    for one, other in zip(rest, whole[3:], strict=True):
        assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=1e-4)


def test_a_request_preempted_in_its_prompt_scores_all_of_it(
    oracle: LlamaForCausalLM, runners: dict[int, Executor]
) -> None:
    # 8 blocks: the first request's answer takes them from the second, whose prompt is computed one token a step.
    engine = make_engine(runners, 8, max_num_batched_tokens=2, max_num_seqs=2, enable_prefix_caching=False)
    victim = Request("victim", PROMPT[:45], replace(GREEDY, max_tokens=3, prompt_logprobs=2))
    first = Request("first", PROMPT[:47], replace(GREEDY, max_tokens=60))
    outputs = run(engine, first, later=[victim])
    assert engine.scheduler.num_preemptions == 1
    assert len(outputs["first"]) == 60
    require_scores(outputs["victim"][0].prompt_logprobs, PROMPT[1:45], log_softmax(oracle, PROMPT[:45])[:-1], 2)


def test_min_tokens_keeps_stops_away_until_then(runners: dict[int, Executor]) -> None:
    # EOS and token 9 are the likeliest by far.
    eager = SamplingParams(temperature=0.0, max_tokens=20, logit_bias=((EOS, 50.0), (9, 60.0)), stop_token_ids=(9,))
    [only] = answer(make_engine(runners), PROMPT, eager)
    assert (only.token_ids, only.finish_reason) == ((9,), FinishReason.STOP)
    for temperature in (0.0, 1.0):
        params = replace(eager, temperature=temperature, min_tokens=6)
        tokens = tokens_of(outputs := answer(make_engine(runners), PROMPT, params))
        assert len(tokens) == 7
        assert not {EOS, 9} & set(tokens[:6])
        assert tokens[6] in {EOS, 9}
        assert outputs[-1].finish_reason is FinishReason.STOP


def random_params(seed: int) -> SamplingParams:
    rng = random.Random(seed)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 40]),
        min_p=rng.choice([0.0, 0.02]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.8]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        logit_bias=rng.choice([(), ((EOS, 5.0),)]),
        min_tokens=rng.choice([0, 12]),
        seed=seed,
        max_tokens=20,
    )


def test_a_seeded_answer_is_the_same_alone_and_in_a_batch_of_16_and_after_preemption(
    runners: dict[int, Executor],
) -> None:
    requests = [Request(f"r{i}", PROMPT[: 20 + i], random_params(i)) for i in range(16)]
    alone = {
        request.request_id: tokens_of(answer(make_engine(runners), request.prompt_token_ids, request.params))
        for request in requests
    }
    together = run(make_engine(runners, max_num_batched_tokens=32, max_num_seqs=32), *requests)
    assert {name: tokens_of(outputs) for name, outputs in together.items()} == alone
    again = [Request(r.request_id, r.prompt_token_ids, r.params) for r in requests]
    crowded = make_engine(runners, 8, max_num_batched_tokens=32, max_num_seqs=32)
    assert {name: tokens_of(outputs) for name, outputs in run(crowded, *again).items()} == alone
    assert crowded.scheduler.num_preemptions > 0
    assert len({tuple(tokens) for tokens in alone.values()}) > 10
