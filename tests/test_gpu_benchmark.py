"""benchmarks/gpu.py gets through on a CPU, where its kernels are interpreted, without what a bare GPU machine lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels of a GPU need Triton: pip install triton")
SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def test_it_runs_without_ray_and_pydantic(tmp_path: Path) -> None:
    for name in ("gguf", "pydantic", "ray", "tokenizers", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError(f'{__name__} is not to be had here')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", "--tiny"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(row.get("ok", False) for row in rows) >= 5
    assert {row["time"] for row in rows if "time" in row} == {
        "attention_decode", "attention_prefill", "decode", "prefill",
    }  # fmt: skip
    assert rows[-1]["failed"] == 0
