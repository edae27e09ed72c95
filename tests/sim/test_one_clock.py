"""Workers and router wait only through asyncio, and start threads only behind `execute` and bulk copies (law 9)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The second runs within a step, beside the model; the third waits in place; the fourth copies; the fifth unmaps; then
# come other processes' ends of steps and copies, and what notices that one of them died. The last two tokenise long
# texts and wait for disks; kv_staging.py has a lock for the threads that copy.
THREADS_ALLOWED = {
    "workers/engine/executor.py",
    "workers/engine/grammar.py",
    "workers/deep_stack.py",
    "workers/kv_transfer/lane.py",
    "workers/kv_transfer/segment.py",
    "workers/engine/kv_staging.py",
    "workers/engine/tensor_parallel.py",
    "workers/engine/rank_process.py",
    "router/text.py",
    "router/jobs/database.py",
    "router/batches/batches.py",
}
# NIXL has to be asked again and again, on the thread of a lane. How long ranks may load is told by the first one's. A
# worker that starts waits for another process that builds its weights.
CLOCKS_ALLOWED = {
    "workers/kv_transfer/nixl.py",
    "workers/engine/tensor_parallel.py",
    "workers/models/shared_weights.py",
}
THREADS = {
    "threading",
    "_thread",
    "concurrent.futures",
    "multiprocessing",
    "queue",
    "asyncio.to_thread",
    "run_in_executor",
}
# The wall clock (time.time) may be told to users; nobody may wait by it.
CLOCKS = {"time.sleep", "time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.perf_counter_ns"}


def names(tree: ast.AST) -> Iterator[str]:
    """Every module and attribute that the code names, dotted as far as it is written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
            if isinstance(node.value, ast.Name):
                yield f"{node.value.id}.{node.attr}"


def test_the_check_sees_what_it_looks_for():
    code = "import time\nfrom concurrent.futures import Executor\ntime.sleep(1)\nloop.run_in_executor(None, f)"
    assert {"time.sleep", "concurrent.futures", "run_in_executor"} <= set(names(ast.parse(code)))


@pytest.mark.parametrize("folder", ["workers", "router"])
def test_no_thread_and_no_real_clock(folder):
    found = [
        (str(path.relative_to(ROOT)), name)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in sorted(set(names(ast.parse(path.read_text()))))
    ]
    offences = [
        (path, name)
        for path, name in found
        if (name in CLOCKS and path not in CLOCKS_ALLOWED) or (name in THREADS and path not in THREADS_ALLOWED)
    ]
    assert offences == []
