"""Prefill and decode with other weights each: prompt positions are computed with P's and generated ones with D's.

The oracle is those two models one after the other, with the KV carried over by hand.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.checkpoints import write_gguf
from tests.kv import read_kv
from tests.workers.models.paged import prompt
from tests.workers.real_workers import answer, real_workers, worker_config
from tests.workers.scheduled import scheduled
from workers.config import Quantization
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import SchedulerOutput
from workers.errors import LayoutMismatchError
from workers.layers import compiled
from workers.layers.linear import make_linear
from workers.request import Request, SamplingParams
from workers.worker import Worker

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [prompt(length, seed=length) for length in (1, 16, 37)]
PREFILL: dict[str, Any] = {"role": "prefill", "quantization": "int8_dynamic", "dtype": "bfloat16"}
DECODE: dict[str, Any] = {
    "role": "decode", "quantization": "native", "dtype": "bfloat16", "prefill_quantization": "int8_dynamic",
}  # fmt: skip
CACHING = {"enable_prefix_caching": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.Q4_1.gguf", GGMLQuantizationType.Q4_1)


def step(runner: ModelRunner, ids: list[int], start: int, table: list[int]) -> int:
    one = scheduled("r", ids[start:], start, table, PARAMS)
    (result,) = runner.execute(SchedulerOutput((one,), len(one.token_ids)))
    return result.tokens[0].token_id


def one_after_the_other(prefill: ModelRunner, decode: ModelRunner, ids: list[int]) -> list[int]:
    table = [3, 1, 2, 0]
    tokens = [step(prefill, ids, 0, table)]
    slots = [table[p // 16] * 16 + p % 16 for p in range(len(ids))]
    num_layers = prefill.layout.num_layers
    decode.write_kv(slots, 0, num_layers, read_kv(prefill, slots, 0, num_layers))
    while len(tokens) < NUM_TOKENS:
        tokens.append(step(decode, [*ids, *tokens], len(ids) + len(tokens) - 1, table))
    return tokens


def test_an_answer_is_that_of_ps_weights_on_the_prompt_and_ds_on_the_rest(model: Path) -> None:
    prefill, decode = ModelRunner(worker_config(model, **PREFILL)), ModelRunner(worker_config(model, **DECODE))
    want = [one_after_the_other(prefill, decode, ids) for ids in PROMPTS]
    alone = [one_after_the_other(decode, decode, ids) for ids in PROMPTS]
    assert want != alone, "a model on which weights make no difference tests nothing"

    async def main() -> list[list[int]]:
        async with real_workers(model, p=PREFILL, d=DECODE) as workers:
            return [await answer(workers["d"], Request("r", ids, PARAMS), workers["p"]) for ids in PROMPTS]

    assert asyncio.run(main()) == want


async def second_turn(p: Worker, d: Worker) -> tuple[list[int], int]:
    """Its prompt, which holds the first turn's answer, and how much of it decode has of the 33 computed."""
    first = prompt(22, seed=1)
    second = [*first, *await answer(d, Request("r1", first, PARAMS), p), 5, 6, 7]
    grant = d.reserve(Request("r2", second, PARAMS))
    d.abort("r2")
    return second, grant.start


def test_what_decode_computed_itself_is_no_prefix_of_a_prompt(model: Path) -> None:
    async def main() -> tuple[list[int], int, list[int]]:
        async with real_workers(model, p=PREFILL | CACHING, d=DECODE | CACHING) as workers:
            ids, start = await second_turn(workers["p"], workers["d"])
            return ids, start, await answer(workers["d"], Request("r3", ids, PARAMS), workers["p"])

    second, start, got = asyncio.run(main())
    assert start == 16, "the one block that came whole from prefill"
    prefill, decode = ModelRunner(worker_config(model, **PREFILL)), ModelRunner(worker_config(model, **DECODE))
    assert got == one_after_the_other(prefill, decode, second)


def test_with_one_kind_of_weights_it_is(model: Path) -> None:
    async def main() -> int:
        native = CACHING | {"quantization": "native"}
        async with real_workers(model, p=native, d=native) as workers:
            return (await second_turn(workers["p"], workers["d"]))[1]

    assert asyncio.run(main()) == 32


def test_decode_takes_kv_of_those_weights_only_that_it_was_told_of(model: Path) -> None:
    prefill, told, untold = (
        ModelRunner(worker_config(model, **settings)).layout
        for settings in (PREFILL, DECODE, DECODE | {"prefill_quantization": None})
    )
    prefill.require_convertible(told)
    with pytest.raises(LayoutMismatchError, match="differ in fingerprint"):
        prefill.require_convertible(untold)


def test_each_quantization_has_a_fingerprint_of_its_own(model: Path) -> None:
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    modes: tuple[Quantization, ...] = ("none", "native", "int8", "int8_dynamic", "int4")
    dense, _, eight, dynamic, four = (make_linear(weight, quantization=mode).name for mode in modes)
    runners = [ModelRunner(worker_config(model, quantization=mode, dtype="bfloat16")) for mode in modes]
    assert len({runner.layout.fingerprint for runner in runners}) == len(modes)
    assert [dict(runner.kernels) for runner in runners] == [
        {dense: 9}, {four: 9}, {eight: 9}, {dynamic: 9}, {four: 8, eight: 1},
    ]  # fmt: skip


@pytest.mark.skipif(not compiled.available(), reason="the kernels were not built: no compiler here")
def test_kv_of_other_kernels_is_told_apart(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ModelRunner(worker_config(model, **PREFILL)).layout
    monkeypatch.setattr(compiled, "_kernels", None)
    theirs = ModelRunner(worker_config(model, **PREFILL)).layout
    with pytest.raises(LayoutMismatchError, match="differ in fingerprint"):
        ours.require_convertible(theirs)
