"""A worker and its ranks live and die together, whatever kills which of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.guard import start_time
from tests.checkpoints import write_folder
from tests.workers.rank_processes import ranks_of

_START_TIMEOUT_S, _END_TIMEOUT_S = 60.0, 10.0


@contextmanager
def worker_of_two_ranks(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Its process, and the other rank's."""
    command = [sys.executable, "-m", "tests.workers.rank_processes", str(folder), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("127.0.0.1:")
            (rank,) = ranks_of(process.pid)
            yield process, rank
        finally:
            process.kill()


def test_a_worker_ends_when_one_of_its_ranks_is_killed(tmp_path: Path) -> None:
    with worker_of_two_ranks(write_folder(tmp_path)) as (process, rank):
        os.kill(rank, signal.SIGKILL)
        assert process.wait(_END_TIMEOUT_S) == 1


def test_a_killed_worker_leaves_no_rank(tmp_path: Path) -> None:
    with worker_of_two_ranks(write_folder(tmp_path)) as (process, rank):
        started = start_time(rank)
        process.kill()
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        while start_time(rank) == started:
            assert time.monotonic() < deadline_s, "the rank outlives its worker"
            time.sleep(0.02)
