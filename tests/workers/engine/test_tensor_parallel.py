"""Ranks as real processes: one Runner to everybody else, and gone as a whole when one of them is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.guard import descendants
from tests.checkpoints import write_folder
from tests.factories import by_choice
from tests.kv import read_kv
from tests.workers.engine.test_model_runner import GREEDY, generate
from tests.workers.engine.test_sampling_params import run
from tests.workers.rank_processes import ranks_of
from tests.workers.scheduled import scheduled
from workers.config import EngineConfig
from workers.engine import rank_group, tensor_parallel
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.model_runner import ModelRunner
from workers.engine.rank_process import cores_of
from workers.engine.scheduler import SchedulerOutput
from workers.engine.tensor_parallel import TensorParallelExecutor, TensorParallelRunner
from workers.errors import ConfigError, FrameError, KVFerryError, UnavailableError
from workers.request import Request, SamplingParams

PROMPT = list(range(3, 43))
CORES = tuple(sorted(os.sched_getaffinity(0)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    settings = {"model": str(folder), "num_gpu_blocks_override": 16, "max_model_len": 128, "num_threads": 1}
    return EngineConfig.model_validate(settings | {"tensor_parallel_size": 2} | changes)


@pytest.fixture(scope="module")
def executor(folder: Path) -> Iterator[TensorParallelExecutor]:
    losses: list[KVFerryError] = []
    made = TensorParallelExecutor(config_of(folder, cpu_affinity=CORES), losses.append)
    yield made
    made.close()
    assert losses == [], "an end that is meant is no loss"


@pytest.fixture(scope="module")
def alone(folder: Path) -> ModelRunner:
    return ModelRunner(config_of(folder, tensor_parallel_size=1))


def test_to_others_it_is_one_runner(executor: TensorParallelExecutor, alone: ModelRunner) -> None:
    runner = executor.runner
    assert runner.layout == alone.layout
    assert (runner.num_blocks, runner.max_model_len) == (alone.num_blocks, alone.max_model_len)
    assert generate(runner, PROMPT, [5, 3, 9, 1], 20) == generate(alone, PROMPT, [5, 3, 9, 1], 20)
    slots = list(range(80, 96)) + list(range(48, 64))
    mine, whole = (np.frombuffer(read_kv(r, slots, 0, 2), np.float32) for r in (runner, alone))
    assert np.abs(mine - whole).max() < 1e-4


@pytest.mark.parametrize(
    ("cores", "size", "dealt"),
    [
        ((0, 1, 2, 3), 2, [(0, 1), (2, 3)]),
        ((4, 5, 7), 2, [(4,), (5, 7)]),
        ((3,), 2, [(3,), (3,)]),
        ("none", 2, [None, None]),
    ],
)
def test_a_workers_cores_are_dealt_out_among_its_ranks(
    folder: Path, cores: object, size: int, dealt: list[tuple[int, ...] | None]
) -> None:
    config = config_of(folder, cpu_affinity=cores, tensor_parallel_size=size)
    assert [cores_of(config, rank) for rank in range(size)] == dealt


def test_a_rank_keeps_to_its_cores(executor: TensorParallelExecutor) -> None:
    wanted = {frozenset(cores_of(config_of(Path(), cpu_affinity=CORES), rank) or ()) for rank in (0, 1)}
    (rank,) = ranks_of(os.getpid())
    mine = executor._step_thread.submit(os.sched_getaffinity, 0).result()
    assert {frozenset(mine), frozenset(os.sched_getaffinity(rank))} == wanted


def test_kv_comes_back_as_it_went_and_a_wrong_size_harms_nobody(executor: TensorParallelExecutor) -> None:
    runner = executor.runner
    slots = [250, 201, 233]
    payload = np.random.default_rng(0).random(3 * runner.layout.token_bytes // 4, np.float32).tobytes()
    with pytest.raises(FrameError, match="is 3072 bytes, not 3068"):
        runner.write_kv(slots, 0, 2, payload[:-4])
    runner.write_kv(slots, 0, 2, payload)
    assert read_kv(runner, slots, 0, 2) == payload
    # [layers, 2, tokens, heads * head_bytes]
    by_slot = np.frombuffer(payload, np.uint8).reshape(2, 2, 3, -1)
    assert read_kv(runner, slots[::-2], 1, 2) == by_slot[1:, :, [2, 0]].tobytes()


def test_copies_go_on_beside_steps(executor: TensorParallelExecutor) -> None:
    runner = executor.runner
    want = generate(runner, PROMPT, [1, 2, 3, 0], 20)
    slots = list(range(8 * 16, 12 * 16))
    payload = np.ones(64 * runner.layout.token_bytes // 4, np.float32).tobytes()

    def copy() -> list[bool]:
        for _ in range(10):
            runner.write_kv(slots, 0, 2, payload)
        return [read_kv(runner, slots, 0, 2) == payload]

    with ThreadPoolExecutor(1) as thread:
        copying = thread.submit(copy)
        assert generate(runner, PROMPT, [4, 5, 6, 7], 20) == want
        assert copying.result() == [True]


def test_the_engine_gives_the_answers_of_one_rank(
    executor: TensorParallelExecutor, alone: ModelRunner, folder: Path
) -> None:
    """Choices copy blocks on every rank, prefixes are found, and the pool is too small for all."""
    answers = []
    for one in (executor, Executor(alone)):
        config = config_of(folder, max_num_batched_tokens=24, max_num_seqs=8)
        engine = Engine(one, config, config)
        wanted = [
            Request("greedy", PROMPT, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)),
            Request("three", PROMPT[:35], SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20, ignore_eos=True)),
            Request("long", PROMPT * 2, SamplingParams(temperature=1.0, seed=4, max_tokens=30, ignore_eos=True)),
        ]
        answers.append({name: by_choice(outputs) for name, outputs in run(engine, *wanted).items()})
        assert engine.scheduler.num_preemptions > 0
        if one is not executor:
            one.close()
    assert answers[0] == answers[1]


def test_what_cannot_be_divided_is_refused_before_any_process_is_started(folder: Path) -> None:
    before = descendants(os.getpid())
    with pytest.raises(ConfigError, match=r"^4 attention heads cannot be divided by tensor_parallel_size 3"):
        TensorParallelRunner(config_of(folder, tensor_parallel_size=3), lambda error: None)
    with pytest.raises(ConfigError, match="9 attention heads cannot be divided by tensor_parallel_size 2"):
        TensorParallelRunner(EngineConfig(tensor_parallel_size=2), lambda error: None)
    assert descendants(os.getpid()) == before


def test_a_rank_that_hangs_is_given_up_in_bounded_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "TIMEOUT_S", 1.0)
    lost = threading.Event()
    before = ranks_of(os.getpid())
    runner = TensorParallelRunner(config_of(folder), lambda error: lost.set())
    (pid,) = ranks_of(os.getpid()) - before
    try:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(UnavailableError, match="is to be started anew"):
            runner.execute(SchedulerOutput((scheduled("r", PROMPT, 0, [1, 2, 3], GREEDY),), len(PROMPT)))
        assert lost.is_set()
        assert ranks_of(os.getpid()) == before
    finally:
        runner.close()


def test_a_rank_that_never_loads_is_given_up_in_bounded_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "_SLOW_LOAD", 0)
    monkeypatch.setattr(tensor_parallel, "_LEAST_LOAD_S", 0.01)
    before = ranks_of(os.getpid())
    with pytest.raises(UnavailableError, match=r"rank 1 \(pid \d+\) has not loaded its part of the model"):
        TensorParallelRunner(config_of(folder), lambda error: None)
    assert ranks_of(os.getpid()) == before


def test_a_rank_that_dies_ends_the_step_and_everything_after_it(folder: Path) -> None:
    losses: list[KVFerryError] = []
    lost = threading.Event()

    def on_death(error: KVFerryError) -> None:
        losses.append(error)
        lost.set()

    before = ranks_of(os.getpid())
    runner = TensorParallelRunner(config_of(folder), on_death)
    (pid,) = ranks_of(os.getpid()) - before
    try:
        os.kill(pid, signal.SIGSTOP)
        step = SchedulerOutput((scheduled("r", PROMPT, 0, [1, 2, 3], GREEDY),), len(PROMPT))
        with ThreadPoolExecutor(1) as thread:
            stepping = thread.submit(runner.execute, step)
            time.sleep(0.2)
            assert not stepping.done()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(UnavailableError, match=rf"rank 1 \(pid {pid}\) died"):
                stepping.result(timeout=10)
        assert lost.wait(10)
        for call in (lambda: runner.execute(step), lambda: read_kv(runner, [1], 0, 1)):
            with pytest.raises(UnavailableError, match="is to be started anew"):
                call()
        assert len(losses) == 1
    finally:
        runner.close()
