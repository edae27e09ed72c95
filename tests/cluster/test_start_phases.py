"""What `kvferry status` tells about the way to ready."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from cluster.render import status_object, status_title
from protos import router_pb2, worker_pb2
from workers.startup import StartUp, phases_to_proto


def test_phases_fill_the_time_from_the_beginning_without_gaps(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    startup = StartUp(began_unix_s=98.0)
    startup.end("process")
    now_s = 103.5
    startup.end("imports")
    now_s = 103.6
    startup.end("weights")
    assert startup.phases == pytest.approx({"process": 2.0, "imports": 3.5, "weights": 0.1})
    assert list(startup.phases) == ["process", "imports", "weights"]


def test_a_process_knows_when_it_was_started():
    code = "import time; time.sleep(0.3)\nfrom workers.startup import *\nprint(process_began_unix_s())"
    before_s = time.time()
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # The kernel counts ticks, and its clock is not ours.
    assert before_s - 0.1 <= float(output) <= before_s + 0.25, os.times()


def test_status_shows_the_cluster_s_the_slowest_worker_s_and_the_router_s_phases():
    workers = [
        worker_pb2.WorkerStats(name=name, start_phases=phases_to_proto({"imports": 1.0, "weights": seconds}))
        for name, seconds in (("prefill-0", 2.0), ("decode-0", 3.04), ("decode-1", 0.5))
    ]
    status = router_pb2.GetStatusResponse(
        workers=[router_pb2.WorkerStatus(stats=stats) for stats in workers],
        routers=[router_pb2.RouterStatus(name="router-0", start_phases=phases_to_proto({"serve": 0.5}))],
        start_phases=phases_to_proto({"ray": 3.0, "load": 4.2}),
    )
    lines = status_title(status).splitlines()
    assert "started in 7.2 s: ray 3.0, load 4.2" in lines
    assert "  decode-0 in 4.0 s: imports 1.0, weights 3.0" in lines
    assert "  router-0 in 0.5 s: serve 0.5" in lines
    assert not any("prefill-0" in line or "decode-1" in line for line in lines)
    shown = status_object(status)
    assert shown["start_s"] == {"ray": 3.0, "load": 4.2}
    assert [worker["start_s"]["weights"] for worker in shown["workers"]] == [2.0, 3.04, 0.5]
    assert shown["routers"][0]["start_s"] == {"serve": 0.5}


def test_a_cluster_that_is_not_ready_yet_shows_none():
    assert "started in" not in status_title(router_pb2.GetStatusResponse(name="k"))
