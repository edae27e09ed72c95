"""`python -m tests.workers.rank_processes FOLDER SIZE`: a worker in a process of its own, as a cluster starts it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from cluster.guard import descendants
from tests.workers.real_workers import worker_config
from workers.worker import Worker


def ranks_of(pid: int) -> set[int]:
    """The processes of ranks that stem from a process."""
    return {child for child in descendants(pid) if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()}


async def main(folder: str, size: str) -> None:
    worker = Worker(worker_config(Path(folder), tensor_parallel_size=int(size)))
    print(await worker.start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
