"""A seeded answer is a function of the request: whoever shares its steps, whatever was computed before or twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.checkpoints import write_folder
from tests.exact import Comparator, distribution
from tests.workers.engine.test_sampling_params import EOS, PROMPT, random_params, run, tokens_of
from tests.workers.layers.test_sampler import require_chi_square
from tests.workers.models.test_families import Checkpoint
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.model_runner import ModelRunner
from workers.request import Request, SamplingParams

SETTINGS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=100 + i, max_tokens=24)
    for i, (temperature, top_k, top_p) in enumerate(
        (t, k, p) for t in (0.6, 1.0, 1.6, 0.0) for k in (0, 30) for p in (1.0, 0.9)
    )
]
NUM_DRAWS = 2_000
# Blocks of a pool that is too small for all that runs.
SMALL = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Checkpoint:
    return Checkpoint("tiny", folder, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def config_of(folder: Path, caching: bool = False, num_blocks: int = 256) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        num_gpu_blocks_override=num_blocks,
        max_model_len=128,
        max_num_seqs=128,
        max_num_batched_tokens=128,
        enable_prefix_caching=caching,
        num_threads=1,
    )


@pytest.fixture(scope="module")
def executor(folder: Path) -> Iterator[Executor]:
    made = Executor(ModelRunner(config_of(folder)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Executor]:
    made = Executor(ModelRunner(config_of(folder, num_blocks=SMALL)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(folder: Path, executor: Executor) -> list[list[int]]:
    """Each setting's answer with the engine to itself, nothing known before."""
    config = config_of(folder)
    return [tokens_of(run(Engine(executor, config, config), request)[request.request_id]) for request in asked()]


def asked() -> list[Request]:
    """16 requests of different settings whose prompts begin alike."""
    return [Request(f"r{i}", PROMPT[: 20 + i], params) for i, params in enumerate(SETTINGS)]


def require_same(oracle: Checkpoint, requests: list[Request], alone: list[list[int]]) -> None:
    comparator = Comparator(oracle, {EOS})
    for request, reference in zip(requests, alone, strict=True):
        comparator.require_same(request.prompt_token_ids, request.params, request.output_token_ids, reference)
    comparator.check()


def test_alone_it_is_what_transformers_logits_and_the_draw_say(oracle: Checkpoint, alone: list[list[int]]) -> None:
    comparator = Comparator(oracle, {EOS})
    for request, answer in zip(asked(), alone, strict=True):
        comparator.require_same(request.prompt_token_ids, request.params, answer)
    comparator.check()
    assert len({tuple(answer) for answer in alone[:12]}) == 12


@pytest.mark.parametrize("caching", [False, True], ids=["without prefix hits", "with prefix hits"])
@pytest.mark.parametrize("pool", ["executor", "small"], ids=["in a batch of 16", "preempted"])
def test_company_preemption_and_prefix_hits_change_nothing(
    pool: str, caching: bool, folder: Path, oracle: Checkpoint, alone: list[list[int]], request: pytest.FixtureRequest
) -> None:
    config = config_of(folder, caching)
    engine = Engine(request.getfixturevalue(pool), config, config)
    first, *others = asked()
    # Penalties in the same steps, of requests that nobody looks at.
    mates = [Request(f"mate{i}", PROMPT[i : i + 9], random_params(i)) for i in range(4)]
    run(engine, first, later=[*others, *mates])
    require_same(oracle, [first, *others], alone)
    assert (engine.prefix_cache.num_hit_tokens > 0) == caching
    assert (engine.scheduler.num_preemptions > 0) == (pool == "small")
    assert pool == "small" or engine.max_num_running >= 16


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=1), SamplingParams(temperature=1.4, top_k=40, top_p=0.9, max_tokens=1)]
)
def test_first_tokens_of_many_seeds_pass_chi_square(
    params: SamplingParams, folder: Path, executor: Executor, oracle: Checkpoint
) -> None:
    config = config_of(folder)
    engine = Engine(executor, config, config)
    requests = [Request(str(seed), PROMPT[:4], replace(params, seed=seed)) for seed in range(NUM_DRAWS)]
    run(engine, *requests)
    assert engine.max_num_running > 16
    probs: np.ndarray = distribution(oracle.logits(PROMPT[:4], 1)[0], params)
    require_chi_square([request.output_token_ids[0] for request in requests], probs)
