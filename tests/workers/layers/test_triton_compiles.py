"""The kernels are compiled for GPUs of a data centre, to the last instruction, and fit their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels of a GPU need Triton: pip install triton")
# What one program may have of it: 227 KiB on Hopper.
SHARED_BYTES = {90: 227 << 10}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_kernels_compile_and_fit(architecture: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.workers.layers.compile_kernels", str(architecture)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["kernel"] for one in made} == {"_attend_to_splits", "_join_splits", "_attend", "_store", "_copy"}
    for one in made:
        assert one["cubin"] > 0
        assert one["shared"] <= SHARED_BYTES[architecture], one
