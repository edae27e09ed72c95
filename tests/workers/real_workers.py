"""Whole workers with real models on real sockets, with the test as their router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.factories import in_use, tokens_of
from tests.workers.pair import ROUTER, copy_of
from workers.config import TransferConfig, WorkerConfig
from workers.engine.executor import Executor
from workers.engine.model_runner import ModelRunner
from workers.engine.tensor_parallel import TensorParallelExecutor
from workers.errors import BY_NAME
from workers.request import FinishReason, Request, TokenOutput
from workers.worker import Worker

MAX_MODEL_LEN = 128
_ANSWER_TIMEOUT_S = 60.0


def worker_config(folder: Path, **settings: Any) -> WorkerConfig:
    """No prefix caching, so that every hand-off moves all KV; several frames for each."""
    defaults: dict[str, Any] = {
        "model": str(folder),
        "num_gpu_blocks_override": 64,
        "max_model_len": MAX_MODEL_LEN,
        "num_threads": 1,
        "enable_prefix_caching": False,
        "transfer": TransferConfig(frame_bytes=4096),
    }
    return WorkerConfig(**{**defaults, **settings})


def make_executor(config: WorkerConfig) -> Executor:
    if config.tensor_parallel_size == 1:
        return Executor(ModelRunner(config, share_pool=config.role == "prefill"))
    # Not as in a process of its own, which a lost rank would end.
    return TensorParallelExecutor(config, lambda error: None)


@asynccontextmanager
async def real_workers(folder: Path, **settings: dict[str, Any]) -> AsyncIterator[dict[str, Worker]]:
    """Workers by name, each with these settings. At the end all of their blocks are free again."""
    configs = {name: worker_config(folder, name=name, **own) for name, own in settings.items()}
    workers = {name: Worker(config, make_executor=make_executor) for name, config in configs.items()}
    started = []
    try:
        for worker in workers.values():
            await worker.start()
            started.append(worker)
        yield workers
        await _until(lambda: not any(in_use(worker) for worker in workers.values()))
    finally:
        for worker in started:
            await worker.stop()


async def answer(decode: Worker, request: Request, prefill: Worker | None = None) -> list[int]:
    """The tokens of `decode`; with `prefill`, its prompt is computed there. Raises what ended it early."""
    outputs: list[TokenOutput] = []
    listening = asyncio.create_task(_listen(decode, request.request_id, outputs))
    try:
        if prefill is None:
            decode.submit(copy_of(request))
        else:
            outputs += await prefill.prefill(copy_of(request), decode.reserve(copy_of(request)))
        await _until(lambda: any(output.finish_reason for output in outputs))
    finally:
        listening.cancel()
    if outputs[-1].finish_reason is FinishReason.ERROR:
        raise BY_NAME[outputs[-1].error_type](outputs[-1].error_message)
    return tokens_of(sorted(outputs, key=lambda output: output.index))


async def _listen(worker: Worker, request_id: str, outputs: list[TokenOutput]) -> None:
    async for step in worker.outputs.stream(ROUTER):
        outputs += [output for output in step if output.request_id == request_id]


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(_ANSWER_TIMEOUT_S):
        while not holds():  # noqa: ASYNC110  What is waited for is a worker's doing.
            await asyncio.sleep(0.001)
