from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cluster.bench.transfer.far_side import WAYS


@pytest.mark.slow
def test_every_way_is_measured_and_the_last_line_is_all_of_it():
    command = [sys.executable, "-m", "cluster.bench.transfer", "--tokens=600", "--rounds=1", "--model-rounds=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ways"].keys() == {"memcpy", "socket", "bare grpc", "local", *WAYS}
    assert all(way["s_per_1000_tokens"] > 0 for way in result["ways"].values())
    assert result["tls"].keys() == {"grpc", "shm"}
    assert all(goal["met"] in (True, False) for goal in result["goals"].values())
    # Whoever is still running would have been heard of.
    assert done.stderr == ""
