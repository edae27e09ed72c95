"""A process that hangs in its first start does not let `kvferry up` wait for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.guard import descendants

pytestmark = pytest.mark.ray


def test_up_gives_up_on_what_has_not_started_in_time_and_leaves_nothing(home: Path) -> None:
    path = home / "slow.yaml"
    path.write_text("name: slow\nrouter: {http_port: 0, grpc_port: 0}\nstart_timeout_s: 0.01\n")
    command = [sys.executable, "-m", "cluster.cli", "up", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        _, said = process.communicate(timeout=100)
        assert process.returncode == 1
        assert not descendants(process.pid)
    assert "prefill-0, decode-0, router-0: not started within start_timeout_s, 0.01 s; raise it, or see" in said
    assert "Traceback" not in said
