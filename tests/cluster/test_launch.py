"""The command line against a real Ray: what it starts, what it says, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from cluster.client import Client
from cluster.guard import descendants, start_time
from cluster.state import State, StateFolder
from protos.router_pb2 import WORKER_STATE_READY, GetStatusResponse
from tests.checkpoints import write_folder
from workers.errors import KVFerryError

pytestmark = pytest.mark.ray

KVFERRY = [sys.executable, "-m", "cluster.cli"]
CONFIG = "name: test\nrouter: {http_port: 0, grpc_port: 0}\nkv_cache_memory_bytes: 100000000\nmax_model_len: 2048\n"


def kvferry(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVFERRY, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.fixture
def config(home: Path) -> Iterator[Path]:
    path = home / "test.yaml"
    path.write_text(CONFIG)
    yield path
    kvferry("down", "--name", "test")


def running() -> State:
    state = StateFolder("test").running()
    assert state is not None
    return state


def processes_of(pid: int) -> dict[int, str]:
    """The whole tree, each process with its start time."""
    started = {process: start_time(process) for process in (pid, *descendants(pid))}
    return {process: ticks for process, ticks in started.items() if ticks}


def still_there(processes: Mapping[int, str], within_s: float = 0.0) -> set[int]:
    deadline_s = time.monotonic() + within_s
    while True:
        left = {process for process, ticks in processes.items() if start_time(process) == ticks}
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.05)


def test_up_detach_serves_until_down(config):
    up = kvferry("up", config, "--detach")
    assert (up.returncode, up.stderr) == (0, "")
    assert up.stdout.startswith("test is ready: HTTP http://127.0.0.1:")
    processes = processes_of(running().pid)

    status = json.loads(kvferry("status", "--name", "test", "--json").stdout)
    assert status["ready"]
    assert [worker["name"] for worker in status["workers"]] == ["prefill-0", "decode-0"]
    assert len({worker["incarnation"] for worker in status["workers"]}) == 2
    # Ray's own helpers give way to those that serve.
    helpers = [pid for pid in processes if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::DashboardAgent")]
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in helpers} == {19}
    for worker in status["workers"]:
        assert worker["pid"] in processes
        assert os.sched_getaffinity(worker["pid"]) == set(worker["cpu_affinity"])
        assert os.getpriority(os.PRIO_PROCESS, worker["pid"]) == os.getpriority(os.PRIO_PROCESS, 0)
    if len(os.sched_getaffinity(0)) > 1:
        prefill, decode = (set(worker["cpu_affinity"]) for worker in status["workers"])
        assert not prefill & decode

    assert list(status["start_s"]) == ["config", "ray", "load", "serve"]
    assert list(status["routers"][0]["start_s"]) == ["process", "imports", "tokenizer", "workers", "serve"]
    for worker in status["workers"]:
        assert list(worker["start_s"]) == ["process", "imports", "weights", "serve"]
        assert sum(worker["start_s"].values()) < sum(status["start_s"].values())

    answer = kvferry("generate", "Hello", "--name", "test", "--max-tokens", "4", "--temperature", "0")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.strip()

    again = kvferry("up", config)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith("kvferry: a cluster named test is already up")

    assert kvferry("down", "--name", "test").returncode == 0
    assert not still_there(processes)
    assert kvferry("down", "--name", "test").returncode == 1


def test_a_model_that_is_not_there_is_refused_before_ray_is_started(config):
    config.write_text(CONFIG + "model: /nowhere/model.gguf\n")
    up = kvferry("up", config)
    assert (up.returncode, up.stdout) == (2, "")
    assert up.stderr.count("\n") == 1
    assert "/nowhere/model.gguf" in up.stderr
    behind = kvferry("up", config, "--detach")
    assert (behind.returncode, behind.stdout, behind.stderr) == (2, "", up.stderr)


def test_an_error_inside_an_actor_is_one_line_and_leaves_nothing(config, tmp_path):
    """Headers do not tell that a tensor is not what the model needs."""
    model = write_folder(tmp_path / "model")
    tokenizer = Tokenizer(BPE({"a": 0}, []))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**shape, "intermediate_size": 128}))
    config.write_text(f"{CONFIG.replace('2048', '256')}model: {model}\n")
    up = kvferry("up", config)
    assert up.returncode == 2
    assert "mlp.gate_proj.weight has shape (96, 64), its config says (128, 64)" in up.stderr
    assert up.stderr.count("\n") == 1
    assert not StateFolder("test").locked()


def test_interrupting_again_and_again_leaves_nothing(config):
    up = subprocess.Popen([*KVFERRY, "up", str(config)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert up.stdout is not None
    with up.stdout:
        lines = iter(up.stdout.readline, "")
        assert next(line for line in lines if "is ready" in line)
        processes = processes_of(up.pid)
        for _ in range(3):
            os.killpg(up.pid, signal.SIGINT)
            time.sleep(0.1)
        assert up.wait(30) == 0
    assert not still_there(processes)


def test_a_killed_supervisor_leaves_nothing(config):
    assert kvferry("up", config, "--detach").returncode == 0
    pid = running().pid
    processes = processes_of(pid)
    os.kill(pid, signal.SIGKILL)
    assert not still_there(processes, within_s=15)
    assert kvferry("down", "--name", "test").returncode == 1


def status_of(client: Client) -> GetStatusResponse | None:
    try:
        return client.status()
    except KVFerryError:
        return None


def incarnations(status: GetStatusResponse) -> dict[str, str]:
    return {w.stats.name: w.stats.incarnation for w in status.workers if w.state == WORKER_STATE_READY}


def test_whatever_dies_is_replaced_where_it_was(config):
    assert kvferry("up", config, "--detach").returncode == 0
    log = StateFolder("test").logs / "up.log"
    with Client(running().grpc_endpoint) as client:
        before = client.status()
        wanted = client.generate("Hello", max_tokens=4, temperature=0).token_ids
        victims = [worker.stats for worker in before.workers if worker.stats.role == "decode"]
        for pid in (victims[0].pid, before.routers[0].pid):
            os.kill(pid, signal.SIGKILL)
        old, deadline_s = incarnations(before), time.monotonic() + 60
        while (now := status_of(client)) is None or len(incarnations(now)) < 2 or incarnations(now) == old:
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        assert [worker.address for worker in now.workers] == [worker.address for worker in before.workers]
        assert incarnations(now)["prefill-0"] == old["prefill-0"]
        assert incarnations(now)["decode-0"] != old["decode-0"]
        assert now.routers[0].incarnation != before.routers[0].incarnation
        assert client.generate("Hello", max_tokens=4, temperature=0).token_ids == wanted
    assert "decode-0 died: it is started anew now; see " in log.read_text()
    assert "router-0 died: it is started anew now; see " in log.read_text()
    processes = processes_of(running().pid)
    os.kill(running().pid, signal.SIGKILL)
    assert not still_there(processes, within_s=15)
