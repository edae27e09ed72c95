"""Workers that are killed: streams go on while one is left, end with an error when none is, and others take over."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from protos.router_pb2 import WORKER_STATE_READY
from tests.e2e.clusters import KVFERRY, RealCluster, Running, connected, wait_until

pytestmark = pytest.mark.ray

# Much less than another process takes to be there.
WAIT_S = 0.5
# Besides that wait: noticing, and what a busy machine takes for it.
WITHIN_S = WAIT_S + 4.0
# To be noticed, and for another process to load the model.
HEAL_S = 60.0
CONFIG = f"router: {{http_port: 0, grpc_port: 0, worker_wait_s: {WAIT_S}}}\n"


@pytest.fixture
def foreground(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Running]]:
    cluster = RealCluster("e2e-death", tmp_path)
    command = [*KVFERRY, "up", str(cluster.write_config(CONFIG))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=cluster.env) as up:
        assert up.stdout is not None
        try:
            ready = next(line for line in iter(up.stdout.readline, "") if "is ready" in line)
            with connected(cluster, ready) as running:
                yield up, running
        finally:
            if up.poll() is None:
                up.kill()


def read_events(response: httpx.Response, events: queue.Queue[str | None]) -> None:
    """None: the stream has ended, or was closed here."""
    with suppress(httpx.ReadError):
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.put(line.removeprefix("data: "))
    events.put(None)


def test_streams_survive_one_death_end_with_an_error_after_two_and_the_cluster_heals(foreground):
    up, running = foreground
    wanted = text_of(running)
    stats = running.stats()
    assert text_of(running, kill=stats["decode"].pid) == wanted
    wait_until(lambda: ready_pids(running), lambda pids: len(pids) == 2 and stats["decode"].pid not in pids, HEAL_S)
    require_an_error_when_killed(running, ready_pids(running))
    wait_until(lambda: httpx.get(f"{running.http}/ready").text, lambda text: text == '{"status":"ready"}', HEAL_S)
    assert text_of(running) == wanted
    os.killpg(up.pid, signal.SIGINT)
    assert up.wait(30) == 0
    assert not wait_until(running.cluster.processes, lambda left: not left, 5)


def ready_pids(running: Running) -> list[int]:
    return [w.stats.pid for w in running.status().workers if w.state == WORKER_STATE_READY]


def text_of(running: Running, kill: int | None = None) -> str:
    """A greedy answer; in the middle of it, a process is killed."""
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
    text = ""
    with httpx.stream("POST", f"{running.http}/v1/completions", json=body, timeout=60) as response:
        for event in (line.removeprefix("data: ") for line in response.iter_lines() if line):
            if event == "[DONE]":
                break
            text += json.loads(event)["choices"][0]["text"]
            if kill and len(text) > 10:
                os.kill(kill, signal.SIGKILL)
                kill = None
    assert kill is None
    return text


def require_an_error_when_killed(running: Running, pids: list[int]) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    events: queue.Queue[str | None] = queue.Queue()
    with httpx.stream("POST", f"{running.http}/v1/completions", json=body, timeout=60) as response:
        reader = threading.Thread(target=read_events, args=(response, events))
        reader.start()
        for _ in range(3):
            assert "choices" in json.loads(events.get(timeout=30) or "")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        wait_until(lambda: httpx.get(f"{running.http}/ready").status_code, lambda status: status == 503, WITHIN_S)
        assert httpx.get(f"{running.http}/health").status_code == 200
        refused = httpx.post(f"{running.http}/v1/completions", json={**body, "stream": False}, timeout=WITHIN_S)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
        assert int(refused.headers["retry-after"]) >= 1
        last = None
        while (event := events.get(timeout=WITHIN_S)) is not None:
            last = event
        assert time.monotonic() - killed_s < WITHIN_S
        reader.join()
    error = json.loads(last or "")["error"]
    assert error["type"] == "server_error"
    assert "worker" in error["message"]
    assert "\n" not in error["message"]
