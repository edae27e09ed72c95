"""A model over several ranks: rank 0 in this process, the others in their own.

Every rank gets the same steps and computes its part; only rank 0 samples. To everybody else it is one Runner, whose KV
has all heads in the model's order, however many ranks there are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from workers.config import EngineConfig
from workers.engine.executor import Buffer, Executor, StepResult
from workers.engine.kv_pool import require_size
from workers.engine.model_runner import ModelRunner
from workers.engine.rank_group import TIMEOUT_S, RankGroup
from workers.engine.rank_process import KVRange, RankProcess, cores_of, read_part
from workers.engine.scheduler import ScheduledRequest, SchedulerOutput
from workers.errors import KVFerryError, UnavailableError
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.slots import Slots
from workers.models.architecture import read_architecture
from workers.models.resolve import resolve_model
from workers.models.shard import require_divisible

OnDeath = Callable[[KVFerryError], None]
# A rank that dies breaks the others' sums a little before its end is known.
_GRACE_S = 1.0
# How much longer than rank 0 another may take to load its part: so many times what that took, or the time to start a
# process where that is more.
_SLOW_LOAD, _LEAST_LOAD_S = 3, 60.0


class TensorParallelExecutor(Executor):
    def __init__(self, config: EngineConfig, on_death: OnDeath) -> None:
        """`on_death`: called once, on any thread, when a rank is lost and nothing can be computed any more."""
        self._ranks = TensorParallelRunner(config, on_death)
        super().__init__(self._ranks)
        if cores := cores_of(config, 0):
            # torch's own threads inherit them.
            self._step_thread.submit(os.sched_setaffinity, 0, cores)

    def close(self) -> None:
        self._ranks.close()
        super().close()


class TensorParallelRunner:
    """Implements Runner. Once a rank is lost, every method raises UnavailableError."""

    host_pool = None

    def __init__(self, config: EngineConfig, on_death: OnDeath) -> None:
        size = config.tensor_parallel_size
        # Before any process is started.
        require_divisible(read_architecture(resolve_model(config.model)), size)
        self._on_death = on_death
        self._lost: UnavailableError | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="kvferry-ranks-"))
        meeting = self._folder / "meeting"
        self._others = [RankProcess(config, rank, meeting) for rank in range(1, size)]
        try:
            group = RankGroup(0, size, config.device)
            began_s = time.monotonic()
            self._own = ModelRunner(config, group)
            # They load as much, at the same time.
            patience_s = max(_LEAST_LOAD_S, _SLOW_LOAD * (time.monotonic() - began_s))
            self._kv_heads = [self._own.kv_heads, *(rank.wait_until_loaded(patience_s) for rank in self._others)]
            group.connect(meeting)
        except BaseException:
            self.close()
            raise
        self.layout, self.num_blocks = self._own.layout, self._own.num_blocks
        self.max_model_len, self.eos_token_ids = self._own.max_model_len, self._own.eos_token_ids
        self.kernels = self._own.kernels
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def execute(self, batch: SchedulerOutput) -> list[StepResult]:
        with self._together():
            for rank in self._others:
                rank.step(_unsampled(batch))
            return self._own.execute(batch)

    def read_kv(
        self, slots: Slots, layer_start: int, layer_end: int, room: memoryview, dtype: str | None = None
    ) -> None:
        place = KVRange(np.asarray(slots, np.int64), layer_start, layer_end)
        layout = replace(self.layout, dtype=dtype or self.layout.dtype)
        require_size(room, layout, layer_end - layer_start, len(slots))
        with self._together():
            for rank in self._others:
                rank.begin_read(place, dtype)
            own = read_part(self._own, place, dtype)
            parts = [own, *(rank.end_read() for rank in self._others)]
        whole = np.frombuffer(room, np.uint8).reshape(_shape(layout, place, layout.num_kv_heads))
        for heads, part in zip(self._kv_heads, parts, strict=True):
            # Heads that several ranks have are the same in each.
            whole[:, :, :, heads.start : heads.stop] = np.frombuffer(part, np.uint8).reshape(
                _shape(layout, place, len(heads))
            )

    def write_kv(self, slots: Slots, layer_start: int, layer_end: int, payload: Buffer) -> None:
        place = KVRange(np.asarray(slots, np.int64), layer_start, layer_end)
        require_size(payload, self.layout, layer_end - layer_start, len(slots))
        whole = np.frombuffer(payload, np.uint8).reshape(_shape(self.layout, place, self.layout.num_kv_heads))
        own, *parts = (
            np.ascontiguousarray(whole[:, :, :, heads.start : heads.stop]).reshape(-1).data for heads in self._kv_heads
        )
        with self._together():
            for rank, part in zip(self._others, parts, strict=True):
                rank.begin_write(place, part)
            self._own.write_kv(slots, layer_start, layer_end, own)
            for rank in self._others:
                rank.end_write()

    def close(self) -> None:
        self._closing = True
        self._end_others()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do. When it fails here, the others stand somewhere in it, and nothing brings them back."""
        if self._lost:
            raise self._lost
        # A rank that stands still with a full pipe before it lets nobody say that.
        watchdog = threading.Timer(2 * TIMEOUT_S, self._lose, (f"a rank has not come for {2 * TIMEOUT_S:.0f} s",))
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        except Exception as error:
            dead = self._wait_for_dead(_GRACE_S)
            raise self._lose(dead or f"{type(error).__name__}: {error}") from error
        finally:
            watchdog.cancel()

    def _watch(self) -> None:
        self._lose(self._wait_for_dead(None))

    def _wait_for_dead(self, timeout_s: float | None) -> str:
        """Which rank died within that time; empty: none."""
        dead = wait([rank.sentinel for rank in self._others], timeout_s)
        return next((f"{rank} died" for rank in self._others if rank.sentinel in dead), "")

    def _lose(self, reason: str) -> UnavailableError:
        with self._lock:
            first = self._lost is None
            self._lost = self._lost or UnavailableError(
                f"tensor_parallel_size {1 + len(self._others)}: {reason}; this worker is to be started anew"
            )
        self._end_others()
        if first and not self._closing:
            self._on_death(self._lost)
        return self._lost

    def _end_others(self) -> None:
        for rank in self._others:
            rank.end()
        shutil.rmtree(self._folder, ignore_errors=True)


def _unsampled(batch: SchedulerOutput) -> SchedulerOutput:
    """What is to be computed of it, without what is to be chosen then."""
    requests = (ScheduledRequest(r.request_id, r.token_ids, r.start, r.block_table) for r in batch.requests)
    return replace(batch, requests=tuple(requests))


def _shape(layout: KVLayout, place: KVRange, num_heads: int) -> tuple[int, ...]:
    return place.layer_end - place.layer_start, 2, len(place.slots), num_heads, layout.head_bytes
