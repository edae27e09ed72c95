from __future__ import annotations

import random
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import TinyLlama, write_folder, write_tensors
from tests.kv import read_kv
from tests.workers.scheduled import scheduled
from workers.config import EngineConfig
from workers.engine.executor import Runner
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import ScheduledRequest, SchedulerOutput
from workers.errors import ConfigError, FrameError
from workers.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def make_runner(folder: Path, **changes: Any) -> ModelRunner:
    return ModelRunner(EngineConfig.model_validate({"model": str(folder), "num_gpu_blocks_override": 64} | changes))


def step(runner: Runner, *requests: ScheduledRequest) -> list[int | None]:
    results = runner.execute(SchedulerOutput(requests, sum(len(r.token_ids) for r in requests)))
    return [result.tokens[0].token_id if result.tokens else None for result in results]


def generate(
    runner: Runner, prompt: list[int], table: list[int], num_tokens: int, params: SamplingParams = GREEDY
) -> list[int]:
    ids = list(prompt)
    done = 0
    while len(ids) < len(prompt) + num_tokens:
        (token,) = step(runner, scheduled("r", ids[done:], done, table, params))
        assert token is not None
        done = len(ids)
        ids.append(token)
    return ids[len(prompt) :]


def test_limits_and_layout_come_from_the_checkpoint(folder: Path) -> None:
    runner = make_runner(folder)
    assert (runner.max_model_len, runner.num_blocks, runner.eos_token_ids) == (512, 64, frozenset({2}))
    assert (runner.layout.num_layers, runner.layout.num_kv_heads, runner.layout.head_dim) == (2, 2, 32)
    assert (runner.layout.dtype, runner.layout.block_size) == ("float32", 16)


def test_the_pool_takes_the_memory_it_is_given(folder: Path) -> None:
    token_bytes = 2 * 2 * 2 * 32 * 4
    runner = make_runner(
        folder, num_gpu_blocks_override=None, kv_cache_memory_bytes=token_bytes * 16 * 40 + 5, max_model_len=640 - 200
    )
    assert runner.layout.token_bytes == token_bytes
    assert runner.num_blocks == 40


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"max_model_len": 513}, "max_model_len", "513 exceeds the 512 tokens"),
        (
            {"num_gpu_blocks_override": 31},
            "num_gpu_blocks_override",
            "31 blocks hold 496 tokens, fewer than one request of max_model_len 512; "
            "raise num_gpu_blocks_override to 32 or lower max_model_len",
        ),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 50},
            "kv_cache_memory_bytes",
            "larger than this machine's memory",
        ),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 16},
            "kv_cache_memory_bytes",
            "raise kv_cache_memory_bytes to 524288 or lower",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_the_mend(
    folder: Path, changes: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_runner(folder, **changes)
    assert caught.value.param == param


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="device is cuda"):
        make_runner(folder, device="cuda")


def test_chunks_give_no_token_before_the_last(folder: Path) -> None:
    runner = make_runner(folder)
    prompt = list(range(3, 43))
    table = [9, 4, 30]
    whole = generate(runner, prompt, [1, 2, 3], 5)
    assert step(runner, scheduled("r", prompt[:25], 0, table, None)) == [None]
    tokens = step(
        runner,
        scheduled("r", prompt[25:], 25, table, GREEDY),
        scheduled("other", [7] * 20, 0, [50, 51], None),
        scheduled("third", [8], 0, [52], GREEDY),
    )
    assert tokens[:2] == [whole[0], None]
    assert isinstance(tokens[2], int)


def test_sampled_tokens_depend_on_seed_and_position_only(folder: Path) -> None:
    runner = make_runner(folder)
    prompt = list(range(3, 20))
    params = SamplingParams(temperature=1.0, seed=11)
    first = generate(runner, prompt, [1, 2], 10, params)
    assert generate(runner, prompt, [8, 7], 10, params) == first
    assert generate(runner, prompt + first[:4], [20, 21], 6, params) == first[4:]
    assert generate(runner, prompt, [1, 2], 10, SamplingParams(temperature=1.0, seed=12)) != first


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [
        ("float32", "auto"), ("bfloat16", "auto"), ("float16", "auto"),
        ("float32", "bf16"), ("float32", "fp8"), ("bfloat16", "fp8"), ("bfloat16", "fp32"),
    ],
)  # fmt: skip
def test_kv_moves_bit_for_bit_between_runners(folder: Path, dtype: str, kv_cache_dtype: str) -> None:
    settings = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    sender = make_runner(folder, **settings)
    receiver = make_runner(folder, **settings, block_size=8, hash_block_size=8)
    prompt = list(range(3, 43))
    want = generate(sender, prompt, [6, 1, 3], 4)
    slots = [block * 16 + i for block in (6, 1, 3) for i in range(16)][:40]
    targets = [block * 8 + i for block in (9, 2, 60, 4, 5, 7) for i in range(8)][:40]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layer, (start, end) in ((0, (0, 16)), (0, (16, 40)), (1, (0, 40))):
            payload = read_kv(sender, slots[start:end], layer, layer + 1)
            assert len(payload) == (end - start) * sender.layout.token_bytes_per_layer
            receiver.write_kv(targets[start:end], layer, layer + 1, payload)
    assert read_kv(receiver, targets, 0, 2) == read_kv(sender, slots, 0, 2)
    (token,) = step(receiver, scheduled("r", want[:1], 40, [9, 2, 60, 4, 5, 7], GREEDY))
    assert token == want[1]


def test_any_bits_survive_the_pool(folder: Path) -> None:
    runner = make_runner(folder, dtype="bfloat16")
    payload = random.Random(0).randbytes(3 * runner.layout.token_bytes)
    runner.write_kv([100, 3, 77], 0, 2, payload)
    assert read_kv(runner, [100, 3, 77], 0, 2) == payload
    shape = (2, 2, 3, -1)
    by_slot = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(shape)
    assert read_kv(runner, [77], 1, 2) == by_slot[1:, :, 2:].contiguous().numpy().tobytes()


def test_kv_of_a_wrong_size_is_refused(folder: Path) -> None:
    runner = make_runner(folder)
    with pytest.raises(FrameError, match="KV of 2 tokens and 1 layers is 1024 bytes, not 1000"):
        runner.write_kv([1, 2], 0, 1, bytes(1000))


def test_copies_run_beside_steps(folder: Path) -> None:
    runner = make_runner(folder)
    prompt = list(range(3, 43))
    want = generate(runner, prompt, [1, 2, 3, 0], 20)
    payload = random.Random(0).randbytes(160 * runner.layout.token_bytes)
    slots = list(range(50 * 16, 60 * 16))
    seen: list[bool] = []

    def copy() -> None:
        for _ in range(20):
            runner.write_kv(slots, 0, 2, payload)
            seen.append(read_kv(runner, slots, 0, 2) == payload)

    thread = threading.Thread(target=copy)
    thread.start()
    assert generate(runner, prompt, [4, 5, 6, 7], 20) == want
    thread.join()
    assert seen == [True] * 20


def test_the_fingerprint_tells_weights_and_dtypes_apart_but_not_places(folder: Path, tmp_path: Path) -> None:
    same = write_folder(tmp_path / "copy")
    other = write_folder(tmp_path / "other", TinyLlama(seed=1))
    base = make_runner(folder).layout.fingerprint
    assert make_runner(same).layout.fingerprint == base
    assert make_runner(same, block_size=8, hash_block_size=8).layout.fingerprint == base
    assert make_runner(same, dtype="bfloat16").layout.fingerprint != base
    assert make_runner(other).layout.fingerprint != base
    one_bit = TinyLlama().tensors()
    one_bit["model.norm.weight"][0] += 1e-3
    write_tensors(same, one_bit)
    assert make_runner(same).layout.fingerprint != base
