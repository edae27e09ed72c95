"""Workers that hand KV over as in production, with a real pool and no model before it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from workers.allocator import keep_freed_memory
from workers.config import Role, TransferConfig, WorkerConfig
from workers.engine.executor import Buffer, Executor, SampledToken, StepResult
from workers.engine.kv_pool import KVPool
from workers.engine.scheduler import SchedulerOutput
from workers.kv_transfer.frame import ranges_of_frames
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.local import LocalTransport
from workers.kv_transfer.slots import Slots
from workers.kv_transfer.transports import Transports
from workers.security_config import SecurityConfig
from workers.worker import Worker

# SmolLM2-135M in float32: 46,080 bytes a token.
LAYOUT = KVLayout("bench", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
# Far more than any cache holds.
NUM_BLOCKS = 1024


def frame_bytes() -> int:
    """Payload of the frames into which a step's tokens go."""
    num_tokens, frame_bytes = WorkerConfig().max_num_batched_tokens, TransferConfig().frame_bytes
    (first, last), _ = next(ranges_of_frames(LAYOUT, 0, num_tokens, frame_bytes))
    return (last - first) * num_tokens * LAYOUT.token_bytes_per_layer


class Way(NamedTuple):
    """Of KV from one worker to another."""

    transport: str
    # Whether payloads have one.
    checksum: bool = True
    # security.tls
    tls: bool = False


class PoolRunner:
    """Implements Runner: every token is 0, at once."""

    layout = LAYOUT
    num_blocks = NUM_BLOCKS
    max_model_len = NUM_BLOCKS * LAYOUT.block_size
    eos_token_ids: frozenset[int] = frozenset()
    kernels: Mapping[str, int] = {}

    def __init__(self, share_pool: bool = False) -> None:
        keep_freed_memory()
        self._pool = self.host_pool = KVPool(LAYOUT, NUM_BLOCKS, torch.device("cpu"), share_pool)
        # Memory that was never written to is no memory yet.
        self._pool.tensor.fill_(1.0)

    def execute(self, batch: SchedulerOutput) -> list[StepResult]:
        return [StepResult((SampledToken(0),) * len(request.samples)) for request in batch.requests]

    def read_kv(
        self, slots: Slots, layer_start: int, layer_end: int, room: memoryview, dtype: str | None = None
    ) -> None:
        self._pool.read(slots, layer_start, layer_end, room, dtype)

    def write_kv(self, slots: Slots, layer_start: int, layer_end: int, payload: Buffer) -> None:
        self._pool.write(slots, layer_start, layer_end, payload)


def worker_config(role: Role, way: Way, certificates: Path) -> WorkerConfig:
    """Without a checksum where a user's config may not be: to learn what it costs."""
    transfer = TransferConfig.model_validate({"transport": way.transport, "lease_s": 300.0, "rpc_timeout_s": 60.0})
    return WorkerConfig(
        role=role,
        enable_prefix_caching=False,
        transfer=transfer.model_copy(update={"checksum": way.checksum}),
        security=SecurityConfig(tls=str(certificates) if way.tls else None),
    )


async def start_worker(config: WorkerConfig, runner: PoolRunner, local: LocalTransport | None = None) -> Worker:
    """`runner` may be shared by workers of which one is in use at a time."""
    worker = Worker(config, make_executor=lambda _: Executor(runner))
    if local is not None:
        worker.transports = Transports([local])
    await worker.start()
    # Blocks lie anywhere, as in a pool that has been in use.
    blocks = worker.engine.block_manager.allocate(NUM_BLOCKS)
    random.Random(0).shuffle(blocks)
    worker.engine.block_manager.free(blocks)
    return worker
