"""Real models, over gRPC: prefill and decode with other weights each, and a decode worker that dies.

The oracle is those two models one after the other, with the KV carried over by hand.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from router.config import RouterConfig
from router.pool import WorkerPool
from router.router import Router
from tests.checkpoints import write_gguf
from tests.factories import tokens_of
from tests.kv import read_kv
from tests.workers.models.paged import prompt
from tests.workers.real_workers import real_workers, worker_config
from tests.workers.scheduled import scheduled
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import SchedulerOutput
from workers.request import SamplingParams
from workers.rpc import GrpcNetwork

PROMPT = prompt(37, seed=5)
# Many: a worker in this process runs ahead of what its router has read.
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=120, ignore_eos=True)
TABLE = list(range(10))
# In fp32, since generated positions are computed one by one or as one chunk: in bf16 these round at other places.
PREFILL: dict[str, Any] = {
    "role": "prefill", "quantization": "int8_dynamic", "dtype": "float32", "enable_prefix_caching": True,
}  # fmt: skip
DECODE = PREFILL | {"role": "decode", "quantization": "native", "prefill_quantization": "int8_dynamic"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.Q4_1.gguf", GGMLQuantizationType.Q4_1)


def step(runner: ModelRunner, ids: list[int], start: int) -> int:
    (result,) = runner.execute(SchedulerOutput((scheduled("r", ids[start:], start, TABLE, PARAMS),), len(ids) - start))
    return result.tokens[0].token_id


def oracle(model: Path) -> list[int]:
    prefill, decode = ModelRunner(worker_config(model, **PREFILL)), ModelRunner(worker_config(model, **DECODE))
    ids = [*PROMPT, step(prefill, PROMPT, 0)]
    slots, num_layers = range(len(PROMPT)), prefill.layout.num_layers
    decode.write_kv(slots, 0, num_layers, read_kv(prefill, slots, 0, num_layers))
    while len(ids) < len(PROMPT) + (PARAMS.max_tokens or 0):
        ids.append(step(decode, ids, len(ids) - 1))
    return ids[len(PROMPT) :]


async def answer(model: Path, die_after: int) -> list[int]:
    """By 1P2D; after so many tokens the worker that decodes is gone."""
    async with real_workers(model, p=PREFILL, d=DECODE, e=DECODE) as workers:
        config = RouterConfig(heartbeat_s=0.1)
        pool = WorkerPool([worker.address for worker in workers.values()], "router-1", config, GrpcNetwork())
        await pool.start()
        router = Router(pool, config, "router-1")
        outputs = []
        async with aclosing(router.generate(PROMPT, PARAMS, "r")) as stream:
            async for output in stream:
                outputs.append(output)
                if len(outputs) == die_after:
                    name = next(name for name, worker in workers.items() if worker.engine.scheduler.running)
                    await workers.pop(name).stop()
        await router.stop()
        await pool.stop()
        assert workers["p"].engine.num_output_tokens == 1 + (die_after > 0)
        return tokens_of(outputs)


@pytest.mark.parametrize("die_after", [0, 3, 25])
def test_the_answer_is_that_of_ps_weights_on_the_prompt_and_ds_on_the_rest_whoever_dies(model, die_after):
    assert asyncio.run(answer(model, die_after)) == oracle(model)
