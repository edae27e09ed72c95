"""Every family in the real engine, with chunks, prefix hits and preemption going on: still transformers' tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.exact import Comparator
from tests.families import TINY
from tests.workers.engine.test_sampling_params import run
from tests.workers.models.paged import PROMPT_LENGTHS, prompt
from tests.workers.models.test_families import GREEDY, Checkpoint, write
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.executor import Executor, StepResult
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import SchedulerOutput
from workers.request import Request

# The variant of each architecture that has most to it; the others are slow for their number.
RICHEST = {"llama3", "mistral", "qwen2-windows", "qwen3", "phi3", "gemma2-caps", "gemma3", "mixtral", "qwen3_moe"}
# Too few for all, and steps too short for a long prompt.
NUM_BLOCKS, STEP_TOKENS = 30, 48
LONG = prompt(PROMPT_LENGTHS[-1])
# Begin as LONG does; one of them ends amid a block.
ALIKE = {f"alike{shared}": LONG[:shared] + prompt(40, seed=shared) for shared in (96, 150)}
PROMPTS = {str(length): prompt(length, seed=length) for length in PROMPT_LENGTHS[:-1]} | {"long": LONG}


class Recorder(Executor):
    """Keeps what each step computed: (request id, start, number of tokens)."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.chunks: list[tuple[str, int, int]] = []

    async def execute(self, batch: SchedulerOutput) -> list[StepResult]:
        self.chunks += [(r.request_id, r.start, len(r.token_ids)) for r in batch.requests]
        return await super().execute(batch)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in RICHEST else pytest.mark.slow) for name in TINY]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def executor(checkpoint: Checkpoint) -> Iterator[Recorder]:
    made = Recorder(ModelRunner(config_of(checkpoint)))
    yield made
    made.close()


@pytest.fixture
def engine(checkpoint: Checkpoint, executor: Recorder) -> Engine:
    config = config_of(checkpoint)
    return Engine(executor, config, config)


def config_of(checkpoint: Checkpoint) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint.folder),
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=300,
        max_num_seqs=8,
        max_num_batched_tokens=STEP_TOKENS,
        num_threads=1,
    )


def requests_of(prompts: dict[str, list[int]]) -> list[Request]:
    return [Request(name, ids, GREEDY) for name, ids in prompts.items()]


def require_answers(checkpoint: Checkpoint, requests: Sequence[Request]) -> None:
    comparator = Comparator(checkpoint, ())
    for request in requests:
        comparator.require_same(request.prompt_token_ids, GREEDY, request.output_token_ids)
    comparator.check()


def test_alone(checkpoint: Checkpoint, engine: Engine) -> None:
    requests = requests_of(PROMPTS)
    for request in requests:
        run(engine, request)
    assert (engine.max_num_running, engine.scheduler.num_preemptions) == (1, 0)
    require_answers(checkpoint, requests)


def test_among_others_that_share_its_prefix_and_take_its_blocks(
    checkpoint: Checkpoint, engine: Engine, executor: Recorder
) -> None:
    executor.chunks.clear()
    first, later = requests_of(PROMPTS), requests_of(ALIKE)
    run(engine, *first, later=later)
    assert engine.scheduler.num_preemptions > 0
    assert [request.num_cached_tokens for request in later] == [96, 144]
    chunks = [count for name, start, count in executor.chunks if name == "long" and start < len(LONG)]
    assert len(chunks) > len(LONG) // STEP_TOKENS
    assert engine.max_num_running > 3
    require_answers(checkpoint, [*first, *later])
