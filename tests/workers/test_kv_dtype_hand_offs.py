"""Hand-offs between pools of different KV dtypes and block sizes: the sender casts, and nothing else changes.

The oracle is one model that computes the prompt and another that decodes after its KV, rounded here by plain means.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import TinyLlama, write_folder
from tests.kv import read_kv
from tests.workers.models.paged import prompt
from tests.workers.real_workers import answer, real_workers, worker_config
from tests.workers.scheduled import scheduled
from workers.config import TransferConfig
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import SchedulerOutput
from workers.errors import LayoutMismatchError
from workers.request import Request, SamplingParams

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [prompt(length, seed=length) for length in (1, 16, 37)]
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIM = TinyLlama.head_dim


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def numbers_of(payload: bytes, dtype: str) -> torch.Tensor:
    """In fp32: a row for each head of K and V."""
    if dtype != "fp8":
        return torch.frombuffer(bytearray(payload), dtype=TORCH[dtype]).float().view(-1, HEAD_DIM)
    heads = np.frombuffer(payload, np.uint8).reshape(-1, HEAD_DIM + 4)
    bits = torch.from_numpy(heads[:, :HEAD_DIM].copy()).view(torch.float8_e4m3fn).float()
    return bits * torch.from_numpy(heads[:, HEAD_DIM:].copy().view(np.float32))


def payload_of(numbers: torch.Tensor, dtype: str) -> bytes:
    if dtype != "fp8":
        return numbers.to(TORCH[dtype]).view(torch.int16).numpy().tobytes()
    encoded = []
    for head in numbers:
        scale = head.abs().max() / 448
        scaled = (head / scale).to(torch.float8_e4m3fn)
        encoded.append(scaled.view(torch.uint8).numpy().tobytes() + scale.numpy().tobytes())
    return b"".join(encoded)


def step(runner: ModelRunner, ids: list[int], start: int, table: list[int]) -> int:
    one = scheduled("r", ids[start:], start, table, PARAMS)
    (result,) = runner.execute(SchedulerOutput((one,), len(one.token_ids)))
    return result.tokens[0].token_id


def rounded_between(prefill: ModelRunner, decode: ModelRunner, ids: list[int], dtypes: tuple[str, str]) -> list[int]:
    """The answer, computed in two places with KV carried over by hand."""
    end, table = len(ids), [3, 1, 2, 0]
    tokens = [step(prefill, ids, 0, table)]
    layers = range(prefill.layout.num_layers)
    for slot in (table[p // 16] * 16 + p % 16 for p in range(end)):
        for layer in layers:
            kept = read_kv(prefill, [slot], layer, layer + 1)
            decode.write_kv([slot], layer, layer + 1, payload_of(numbers_of(kept, dtypes[0]), dtypes[1]))
    while len(tokens) < NUM_TOKENS:
        tokens.append(step(decode, [*ids, *tokens], end + len(tokens) - 1, table))
    return tokens


ROUTES = [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp8"), ("fp8", "fp32"), ("bf16", "fp16"), ("fp8", "bf16")]


@pytest.mark.parametrize("dtypes", ROUTES, ids="-".join)
def test_kv_is_cast_to_the_receivers_dtype(folder: Path, dtypes: tuple[str, str], caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    prefill, decode = (ModelRunner(worker_config(folder, kv_cache_dtype=dtype)) for dtype in dtypes)
    want = [rounded_between(prefill, decode, ids, dtypes) for ids in PROMPTS]

    async def main() -> list[list[int]]:
        sender, receiver = ({"kv_cache_dtype": dtype} for dtype in dtypes)
        async with real_workers(folder, p=sender, d=receiver | {"block_size": 32}) as workers:
            got = [await answer(workers["d"], Request("r", ids, PARAMS), workers["p"]) for ids in PROMPTS]
            stats = [workers["p"].stats().kv_bytes_sent, workers["d"].stats().kv_bytes_received]
        assert stats == [sum(map(len, PROMPTS)) * decode.layout.token_bytes] * 2
        return got

    assert asyncio.run(main()) == want
    says = f"cast here from {prefill.layout.dtype} to {decode.layout.dtype}"
    assert sum(says in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("dtypes", [("bf16", "fp16"), ("fp32", "fp32")], ids="-".join)
def test_a_pool_is_read_where_it_lies_only_if_nothing_is_to_be_cast(folder: Path, dtypes: tuple[str, str]):
    prefill, decode = (ModelRunner(worker_config(folder, kv_cache_dtype=dtype)) for dtype in dtypes)
    want = [rounded_between(prefill, decode, ids, dtypes) for ids in PROMPTS]

    async def main() -> list[list[int]]:
        shm = {"transfer": TransferConfig(transport="shm", frame_bytes=4096)}
        sender, receiver = (shm | {"kv_cache_dtype": dtype} for dtype in dtypes)
        async with real_workers(folder, p=sender | {"role": "prefill"}, d=receiver | {"block_size": 32}) as workers:
            got = [await answer(workers["d"], Request("r", ids, PARAMS), workers["p"]) for ids in PROMPTS]
            (peer,) = workers["p"]._peers.connected
            was_copied = bool(peer._sender._idle)  # type: ignore[attr-defined]
        assert was_copied == (dtypes[0] != dtypes[1])
        return got

    assert asyncio.run(main()) == want


def test_a_prefix_that_came_in_another_dtype_is_found_again(folder: Path):
    first, second = (prompt(64) + prompt(length, seed=length) for length in (9, 30))

    async def ask(caching: bool) -> tuple[list[int], int]:
        settings = {"enable_prefix_caching": caching}
        receiver = {"kv_cache_dtype": "bf16", "block_size": 32}
        async with real_workers(folder, p=settings, d=settings | receiver) as workers:
            for ids in (first, second):
                before = workers["d"].stats().kv_bytes_received
                tokens = await answer(workers["d"], Request("r", ids, PARAMS), workers["p"])
            num_bytes = workers["d"].stats().kv_bytes_received - before
            return tokens, num_bytes // workers["d"].layout.token_bytes

    known, fresh = (asyncio.run(ask(caching)) for caching in (True, False))
    assert known == (fresh[0], len(second) - 64)
    assert fresh[1] == len(second)


def test_blocks_have_the_same_names_whatever_the_pool(folder: Path):
    base = ModelRunner(worker_config(folder)).layout.fingerprint
    for settings in ({"kv_cache_dtype": "fp8"}, {"block_size": 32}):
        assert ModelRunner(worker_config(folder, **settings)).layout.fingerprint == base


def test_ranks_cast_the_heads_that_they_have(folder: Path):
    async def main() -> tuple[list[int], list[int]]:
        two = {"tensor_parallel_size": 2}
        async with real_workers(folder, one={}, two=two, d={"kv_cache_dtype": "fp8"}) as workers:
            request = Request("r", PROMPTS[-1], PARAMS)
            first, second = [await answer(workers["d"], request, workers[name]) for name in ("one", "two")]
            return first, second

    first, second = asyncio.run(main())
    assert first == second


def test_workers_that_compute_in_other_dtypes_are_refused_at_connect(folder: Path):
    async def main() -> None:
        async with real_workers(folder, p={"dtype": "bfloat16", "kv_cache_dtype": "fp32"}, d={}) as workers:
            with pytest.raises(LayoutMismatchError, match="differ in fingerprint") as caught:
                await answer(workers["d"], Request("r", PROMPTS[0], PARAMS), workers["p"])
            assert caught.value.param == "fingerprint"
            workers["d"].abort("r")

    asyncio.run(main())
