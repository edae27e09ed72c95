"""A rank in a process of its own: it computes its part of every step and keeps the KV of its own heads.

Two pipes lead to it, since copies go on beside steps. It ends when rank 0's process does, however that ends, and by any
error of its own, which the others notice at their next sum.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import Pipe, get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from workers.config import EngineConfig
from workers.engine.executor import Buffer
from workers.engine.model_runner import ModelRunner
from workers.engine.rank_group import TIMEOUT_S, RankGroup
from workers.engine.scheduler import SchedulerOutput
from workers.errors import KVFerryError, UnavailableError
from workers.models.shard import share

T = TypeVar("T")
_EXIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class KVRange:
    """What Runner.read_kv and write_kv are asked for."""

    slots: npt.NDArray[np.int64]
    layer_start: int
    layer_end: int


class RankProcess:
    """Rank 0's view of another rank. Raises UnavailableError when that is gone or does not answer."""

    def __init__(self, config: EngineConfig, rank: int, meeting: Path) -> None:
        """Start it; `wait_until_loaded` says how that went. `meeting`: for RankGroup.connect."""
        self._rank = rank
        self._steps, steps = Pipe()
        self._copies, copies = Pipe()
        self._process = get_context("spawn").Process(
            target=_run, args=(config, rank, meeting, steps, copies), name=f"rank {rank}", daemon=True
        )
        self._process.start()
        steps.close()
        copies.close()

    def __str__(self) -> str:
        return f"rank {self._rank} (pid {self._process.pid})"

    @property
    def sentinel(self) -> int:
        """Ready when it has ended (multiprocessing.connection.wait)."""
        return self._process.sentinel

    def wait_until_loaded(self, timeout_s: float) -> range:
        """Its KV heads. Raises what kept it from loading its part of the model."""
        if not self._talk(lambda: self._steps.poll(timeout_s)):
            raise UnavailableError(f"{self} has not loaded its part of the model {timeout_s:.0f} s after rank 0")
        loaded: range | KVFerryError = self._talk(self._steps.recv)
        if isinstance(loaded, KVFerryError):
            raise loaded
        return loaded

    def step(self, batch: SchedulerOutput) -> None:
        """Have it begin; its end is that of the last sum."""
        self._talk(lambda: self._steps.send(batch))

    def begin_read(self, place: KVRange, dtype: str | None) -> None:
        self._talk(lambda: self._copies.send((place, dtype, False)))

    def end_read(self) -> bytes:
        return self._answer()

    def begin_write(self, place: KVRange, payload: Buffer) -> None:
        self._talk(lambda: self._copies.send((place, None, True)))
        self._talk(lambda: self._copies.send_bytes(payload))

    def end_write(self) -> None:
        self._answer()

    def end(self) -> None:
        self._process.kill()
        self._process.join(_EXIT_TIMEOUT_S)

    def _answer(self) -> bytes:
        if not self._talk(lambda: self._copies.poll(TIMEOUT_S)):
            raise UnavailableError(f"{self} has not answered for {TIMEOUT_S:.0f} s")
        return self._talk(self._copies.recv_bytes)

    def _talk(self, say: Callable[[], T]) -> T:
        try:
            return say()
        except (EOFError, OSError) as error:
            raise UnavailableError(f"{self} is gone") from error


def read_part(runner: ModelRunner, place: KVRange, dtype: str | None) -> Buffer:
    """The KV of a rank's own heads."""
    layout = replace(runner.layout, num_kv_heads=len(runner.kv_heads), dtype=dtype or runner.layout.dtype)
    room = bytearray((place.layer_end - place.layer_start) * len(place.slots) * layout.token_bytes_per_layer)
    runner.read_kv(place.slots, place.layer_start, place.layer_end, memoryview(room), dtype)
    return room


def cores_of(config: EngineConfig, rank: int) -> tuple[int, ...] | None:
    """A rank's part of its worker's cores: at least one, shared with others where there are too few. None: any."""
    cores, size = config.cpu_affinity, config.tensor_parallel_size
    if not isinstance(cores, tuple) or not cores:
        return None
    return tuple(cores[i] for i in share(len(cores), rank, size)) or (cores[rank % len(cores)],)


def _run(config: EngineConfig, rank: int, meeting: Path, steps: Connection, copies: Connection) -> None:
    threading.Thread(target=_end_with_parent, args=(meeting,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0's process, and its end for this one.
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s")
    if cores := cores_of(config, rank):
        os.sched_setaffinity(0, cores)
    group = RankGroup(rank, config.tensor_parallel_size, config.device)
    try:
        runner = ModelRunner(config, group)
    except KVFerryError as error:
        steps.send(error)
        return
    steps.send(runner.kv_heads)
    group.connect(meeting)
    threading.Thread(target=_serve_copies, args=(runner, copies), daemon=True).start()
    while True:
        runner.execute(steps.recv())


def _end_with_parent(meeting: Path) -> None:
    parent = parent_process()
    assert parent is not None, "a rank's process is a child"
    wait([parent.sentinel])
    shutil.rmtree(meeting.parent, ignore_errors=True)  # What rank 0 does at any other end.
    os._exit(1)


def _serve_copies(runner: ModelRunner, copies: Connection) -> None:
    try:
        while True:
            place, dtype, write = copies.recv()
            if write:
                runner.write_kv(place.slots, place.layer_start, place.layer_end, copies.recv_bytes())
                copies.send_bytes(b"")
            else:
                copies.send_bytes(read_part(runner, place, dtype))
    finally:
        os._exit(1)  # An error of this thread is the process's.
