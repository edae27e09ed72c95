"""Steps and copies on the virtual clock: each takes the time it is said to take, then happens at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from workers.engine.executor import Buffer, Executor, Runner, StepResult
from workers.engine.scheduler import SchedulerOutput

StepTime = Callable[[SchedulerOutput], float]
# Of a copy of that many slots.
CopyTime = Callable[[int], float]


def step_time(batch: SchedulerOutput) -> float:
    """A launch, and a little for every token."""
    return 0.005 + 0.0001 * batch.num_tokens


def copy_time(num_slots: int) -> float:
    return 0.0002 + 0.00001 * num_slots


class SimExecutor(Executor):
    """Starts no thread. The pool is read and written at the end of the time taken, when blocks that were given away
    too early have found new owners."""

    def __init__(self, runner: Runner, step_s: StepTime = step_time, copy_s: CopyTime = copy_time) -> None:
        super().__init__(runner)
        self._step_s = step_s
        self._copy_s = copy_s

    async def execute(self, batch: SchedulerOutput) -> list[StepResult]:
        await asyncio.sleep(self._step_s(batch))
        return self.runner.execute(batch)

    async def read_kv(self, slots: Sequence[int], layer_start: int, layer_end: int, dtype: str | None = None) -> Buffer:
        await asyncio.sleep(self._copy_s(len(slots)))
        return self.runner.read_kv(slots, layer_start, layer_end, dtype)

    async def write_kv(self, slots: Sequence[int], layer_start: int, layer_end: int, payload: Buffer) -> None:
        await asyncio.sleep(self._copy_s(len(slots)))
        self.runner.write_kv(slots, layer_start, layer_end, payload)
