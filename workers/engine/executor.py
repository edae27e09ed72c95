"""Between the event loop and the model: the only place where a step or a bulk copy may leave the loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from workers.engine.scheduler import SchedulerOutput
from workers.errors import KVFerryError
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.rows import Crcs
from workers.kv_transfer.slots import Slots
from workers.request import TokenLogprobs

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one request got from a step: a token for each of its samples, and logprobs where asked for."""

    tokens: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Why it cannot go on; its tokens then mean nothing.
    error: KVFerryError | None = None


class HostPool(Protocol):
    """KV in this process's own memory."""

    def locate(self, slots: Slots, layer_start: int, layer_end: int) -> KVRows:
        """Where the KV that Runner.read_kv copies lies."""

    def pull(self, slots: Slots, layer_start: int, layer_end: int, rows: KVRows) -> None:
        """As Runner.write_kv, out of other memory. Raises FrameError when it is of another shape."""

    def pull_and_check(self, slots: Slots, layer_start: int, layer_end: int, rows: KVRows) -> Crcs:
        """As pull; the CRCs of what came (KVRows.crcs)."""


class Runner(Protocol):
    """A model and its KV pool, synchronous. Threads may call its methods at once, on different blocks."""

    layout: KVLayout
    num_blocks: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    # How many matrices each kernel multiplies.
    kernels: Mapping[str, int]

    @property
    def host_pool(self) -> HostPool | None:
        """None: its KV is not in memory, or not in this process's."""

    def execute(self, batch: SchedulerOutput) -> list[StepResult]:
        """Do the step's copies, then compute it; one result for each request, in their order."""

    def read_kv(
        self, slots: Slots, layer_start: int, layer_end: int, room: memoryview, dtype: str | None = None
    ) -> None:
        """Copy the KV in `slots` to `room`: [layer_end - layer_start, 2, len(slots), num_kv_heads, head_bytes].

        `dtype`: as a pool of that dtype would hold it (KVLayout.dtype); None: bit for bit.
        """

    def write_kv(self, slots: Slots, layer_start: int, layer_end: int, payload: Buffer) -> None:
        """Put KV of read_kv's shape into `slots`."""


class Executor:
    """Runs a Runner's step on one thread and its copies on another, so that the loop never waits for either."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._step_thread = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copy")

    async def execute(self, batch: SchedulerOutput) -> list[StepResult]:
        return await self._run(self._step_thread, lambda: self.runner.execute(batch))

    async def copy(self, num_tokens: int, call: Callable[[], T]) -> T:
        """What `call` gives, which copies KV of so many tokens, and does what else must not be done on the loop."""
        return await self._run(self._copy_thread, call)

    def close(self) -> None:
        self._step_thread.shutdown(wait=True, cancel_futures=True)
        self._copy_thread.shutdown(wait=True, cancel_futures=True)

    async def _run(self, thread: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, call)
