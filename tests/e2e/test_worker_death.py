"""Workers that are killed: a stream goes on while one is left, and ends with an error when none is."""

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

from cluster.client import Client
from tests.e2e.clusters import KVFERRY, RealCluster, Running, connected, wait_until
from workers.errors import UnavailableError

pytestmark = pytest.mark.ray

WAIT_S = 2.0
# Besides that wait: noticing, and what a busy machine takes for it.
WITHIN_S = WAIT_S + 4.0
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


def test_prefill_takes_over_from_a_killed_decode_worker_and_without_both_answers_end_with_an_error(foreground):
    up, running = foreground
    pids = {role: stats.pid for role, stats in running.stats().items()}
    _require_the_same_text_when_killed(running, pids["decode"])
    _require_an_error_when_killed(running, pids["prefill"])
    os.killpg(up.pid, signal.SIGINT)
    assert up.wait(30) == 0
    assert not wait_until(running.cluster.processes, lambda left: not left, 5)


def _require_the_same_text_when_killed(running: Running, decode_pid: int) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    wanted = httpx.post(f"{running.http}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    killed = False
    with httpx.stream("POST", f"{running.http}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        text = ""
        for event in (line.removeprefix("data: ") for line in response.iter_lines() if line):
            if event == "[DONE]":
                break
            text += json.loads(event)["choices"][0]["text"]
            if not killed and len(text) > 10:
                os.kill(decode_pid, signal.SIGKILL)
                killed = True
    assert killed
    assert text == wanted
    ready = httpx.get(f"{running.http}/ready")
    assert (ready.status_code, ready.json()["reason"]) == (200, "no decode worker answers: prefill workers decode")
    again = httpx.post(f"{running.http}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert again == wanted


def _require_an_error_when_killed(running: Running, prefill_pid: int) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    assert httpx.get(f"{running.http}/ready").status_code == 200
    events: queue.Queue[str | None] = queue.Queue()
    with httpx.stream("POST", f"{running.http}/v1/completions", json=body, timeout=60) as response:
        reader = threading.Thread(target=read_events, args=(response, events))
        reader.start()
        for _ in range(3):
            assert "choices" in json.loads(events.get(timeout=30) or "")
        os.kill(prefill_pid, signal.SIGKILL)
        killed_s = time.monotonic()
        wait_until(lambda: httpx.get(f"{running.http}/ready").status_code, lambda status: status == 503, WITHIN_S)
        last = None
        while (event := events.get(timeout=WITHIN_S)) is not None:
            last = event
        assert time.monotonic() - killed_s < WITHIN_S
        reader.join()
    error = json.loads(last or "")["error"]
    assert error["type"] == "server_error"
    assert "worker" in error["message"]
    assert "\n" not in error["message"]

    reason = "no prefill and no decode worker answers"
    assert httpx.get(f"{running.http}/ready").json()["reason"] == reason
    assert httpx.get(f"{running.http}/health").status_code == 200
    refused = httpx.post(f"{running.http}/v1/completions", json={**body, "stream": False}, timeout=WITHIN_S)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
    assert int(refused.headers["retry-after"]) >= 1
    with Client(running.grpc) as client, pytest.raises(UnavailableError, match=reason):
        client.generate("Hi", max_tokens=4, timeout_s=WITHIN_S)
