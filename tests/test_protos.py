"""The generated code beside protos/*.proto is what `make proto` makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_committed_code_is_what_the_protos_generate(tmp_path):
    command = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "grpc_tools.protoc" in line)
    for kind in ("--python_out", "--pyi_out", "--grpc_python_out", "--mypy_grpc_out"):
        assert f"{kind}=." in command
    outputs = [f"{kind}={tmp_path}" for kind in ("--python_out", "--pyi_out", "--grpc_python_out", "--mypy_grpc_out")]
    protos = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "protos").glob("*.proto"))]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *outputs, *protos], cwd=ROOT, env=environment, check=True
    )

    made = {path.name: path.read_text() for path in (tmp_path / "protos").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "protos").glob("*_pb2*")}
    stale = sorted(name for name in made.keys() | committed.keys() if made.get(name) != committed.get(name))
    assert not stale, f"run `make proto`: {stale}"
