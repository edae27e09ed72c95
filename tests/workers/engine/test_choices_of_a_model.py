"""Several choices of one request on a real model: shared blocks, and copies of the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_folder
from tests.factories import by_choice, make_request, run_engine
from tests.kv import read_kv
from tests.workers.scheduled import scheduled
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import SchedulerOutput
from workers.request import Request, SamplingParams, TokenOutput

PROMPT = [3 + i * 7 % 250 for i in range(90)]
PLAIN = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
PENALISED = replace(PLAIN, frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=3, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield write_folder(tmp_path_factory.mktemp("tiny"))
    torch.set_num_threads(threads)


def config_of(folder: Path, dtype: str = "auto") -> EngineConfig:
    settings = {"model": str(folder), "num_gpu_blocks_override": 40, "dtype": dtype, "num_threads": 1}
    return EngineConfig.model_validate(settings | {"max_num_batched_tokens": 64})


def answers(engine: Engine, *requests: Request) -> list[list[TokenOutput]]:
    async def main() -> list[list[TokenOutput]]:
        for request in requests:
            engine.add(request)
        outputs = await run_engine(engine)
        return [outputs[request.request_id] for request in requests]

    return asyncio.run(main())


@pytest.mark.parametrize("params", [PLAIN, PENALISED], ids=["plain", "penalised"])
def test_choices_are_the_answers_of_single_runs_with_their_index(folder: Path, params: SamplingParams) -> None:
    config = config_of(folder)
    executor = Executor(ModelRunner(config))
    for length in (1, 15, 16, 17, 48, 90):
        (outputs,) = answers(Engine(executor, config, config), make_request(PROMPT[:length], replace(params, n=3)))
        found = by_choice(outputs)
        assert len({tuple(tokens) for tokens in found.values()}) == 3
        for choice, tokens in found.items():
            engine = Engine(executor, config, config)
            (alone,) = answers(engine, make_request(PROMPT[:length], params, choice=choice))
            assert by_choice(alone) == {choice: tokens}
            for one, other in zip(alone, (o for o in outputs if o.choice == choice), strict=True):
                assert [s.token_id for s in one.logprobs] == [s.token_id for s in other.logprobs]
                assert [s.logprob for s in one.logprobs] == pytest.approx([s.logprob for s in other.logprobs], abs=1e-4)
    executor.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copied_block_has_the_same_bits_in_every_layer_and_no_other_changes(folder: Path, dtype: str) -> None:
    runner = ModelRunner(config_of(folder, dtype))
    runner.execute(SchedulerOutput((scheduled("r", PROMPT[:40], 0, [6, 1, 3]),), 40))
    everything = list(range(40 * 16))
    before = torch.frombuffer(bytearray(read_kv(runner, everything, 0, 2)), dtype=torch.uint8).view(4, 40, -1)
    # The step computes one token into block 9, which is none of them.
    step = SchedulerOutput((scheduled("s", PROMPT[:1], 0, [9]),), 1, copies=((3, 7), (3, 8), (1, 2)))
    runner.execute(step)
    after = torch.frombuffer(bytearray(read_kv(runner, everything, 0, 2)), dtype=torch.uint8).view(4, 40, -1)
    wanted = before.clone()
    for source, target in step.copies:
        wanted[:, target] = before[:, source]
    wanted[:, 9] = after[:, 9]
    assert torch.equal(after, wanted)
    assert wanted[:, 3].any()
