"""The packaged SmolLM2 through the engine, in chunks, in company and with prefix hits, against transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from tests.exact import Comparator
from tests.oracle import TransformersOracle
from tests.prompts import MODEL, token_ids, tokenizer
from tests.workers.engine.test_sampling_params import require_scores, run, tokens_of
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.model_runner import ModelRunner
from workers.models.resolve import resolve_model
from workers.request import Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
# Prompts of 40 tokens or so are computed in several steps.
CONFIG = EngineConfig(
    model=MODEL, num_gpu_blocks_override=48, max_model_len=128, max_num_batched_tokens=24, max_num_seqs=8
)
PROMPTS = [token_ids(f"Name {what}.") for what in ("three rivers", "a colour", "a river in Asia", "two kinds of trees")]
SEEDED = [
    SamplingParams(temperature=0.7, seed=1, max_tokens=8),
    SamplingParams(temperature=1.2, seed=2, top_k=50, max_tokens=8),
    SamplingParams(temperature=1.0, seed=3, top_p=0.9, max_tokens=8),
    GREEDY,
]


@pytest.fixture(scope="module")
def oracle() -> TransformersOracle:
    return TransformersOracle(resolve_model(MODEL), tokenizer().eos_token_ids)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    made = Executor(ModelRunner(CONFIG))
    yield made
    made.close()


@pytest.fixture
def engine(executor: Executor) -> Engine:
    return Engine(executor, CONFIG, CONFIG)


def log_softmax(oracle: TransformersOracle, ids: Sequence[int], num_last: int) -> torch.Tensor:
    """[num_last, vocab_size]: of what follows each of the last tokens."""
    return torch.from_numpy(oracle.logits(ids, num_last)).log_softmax(dim=-1)


def test_greedy_tokens_are_those_of_transformers(engine: Engine, oracle: TransformersOracle) -> None:
    comparator = Comparator(oracle, engine.eos_token_ids)
    tokens = tokens_of(run(engine, Request("r", PROMPTS[0], GREEDY))["r"])
    comparator.require_same(PROMPTS[0], GREEDY, tokens)
    comparator.check()


def test_logprobs_are_those_of_transformers_in_chunks_and_after_a_prefix_hit(
    engine: Engine, oracle: TransformersOracle
) -> None:
    prompt = PROMPTS[0]
    asked = replace(GREEDY, logprobs=3, max_tokens=4)
    for name, params, hit in (
        ("cold", replace(asked, prompt_logprobs=2), False),
        ("warm", asked, True),
        # Those of the prompt are wanted again: all of it is computed again.
        ("warm, prompt too", replace(asked, prompt_logprobs=2), False),
    ):
        steps = engine.num_steps
        outputs = run(engine, Request(name, prompt, params))[name]
        assert (outputs[0].num_cached_tokens > 0) == hit
        assert hit or engine.num_steps - steps > params.max_tokens  # type: ignore[operator]
        tokens = tokens_of(outputs)
        want = log_softmax(oracle, [*prompt, *tokens[:-1]], len(prompt) + len(tokens) - 1)
        require_scores([one for output in outputs for one in output.logprobs], tokens, want[len(prompt) - 1 :], 3)
        if params.prompt_logprobs is not None:
            require_scores(outputs[0].prompt_logprobs, prompt[1:], want[: len(prompt) - 1], 2)


def test_seeded_text_is_the_same_alone_in_company_and_after_a_prefix_hit(
    engine: Engine, executor: Executor, oracle: TransformersOracle
) -> None:
    comparator = Comparator(oracle, engine.eos_token_ids)
    asked = [Request(f"r{i}", ids, params) for i, (ids, params) in enumerate(zip(PROMPTS, SEEDED, strict=True))]
    alone = {r.request_id: tokens_of(run(Engine(executor, CONFIG, CONFIG), r)[r.request_id]) for r in asked}
    for hit in (False, True):
        again = [Request(r.request_id, r.prompt_token_ids, r.params) for r in asked]
        outputs = run(engine, *again)
        assert not hit or all(outputs[r.request_id][0].num_cached_tokens for r in again)
        for r in again:
            comparator.require_same(r.prompt_token_ids, r.params, r.output_token_ids, alone[r.request_id])
    assert engine.max_num_running == len(asked)
    comparator.check()
