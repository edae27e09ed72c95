"""A model that is not there, for what only scheduling and memory decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.engine.executor import Buffer, SampledToken, StepResult
from workers.engine.scheduler import SchedulerOutput
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.slots import Slots


@dataclass
class EmptyRunner:
    """Implements Runner: every token is 0, and KV has no layers."""

    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    host_pool: None = None
    kernels: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = KVLayout("empty", 0, 1, 1, self.block_size, "float32")

    def execute(self, batch: SchedulerOutput) -> list[StepResult]:
        return [StepResult((SampledToken(0),) * len(request.samples)) for request in batch.requests]

    def read_kv(
        self, slots: Slots, layer_start: int, layer_end: int, room: memoryview, dtype: str | None = None
    ) -> None:
        pass

    def write_kv(self, slots: Slots, layer_start: int, layer_end: int, payload: Buffer) -> None:
        pass
