"""Steps and copies on the virtual clock: each takes the time it is said to take, then happens at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from workers.engine.executor import Executor, Runner, StepResult, T
from workers.engine.scheduler import SchedulerOutput

StepTime = Callable[[SchedulerOutput], float]
# Of a copy of the KV of so many tokens.
CopyTime = Callable[[int], float]


def step_time(batch: SchedulerOutput) -> float:
    """A launch, and a little for every token."""
    return 0.005 + 0.0001 * batch.num_tokens


def h100_step_time(num_tokens: int) -> float:
    """Of a large model: a straight line through shared/data/profiles, llama2-70b on eight H100, where a step of 1, 512,
    1024 and 2048 tokens takes 30, 54, 78 and 137 ms."""
    return 0.029 + 0.00005 * num_tokens


def copy_time(num_tokens: int) -> float:
    return 0.0002 + 0.00001 * num_tokens


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

    async def copy(self, num_tokens: int, call: Callable[[], T]) -> T:
        await asyncio.sleep(self._copy_s(num_tokens))
        return call()
