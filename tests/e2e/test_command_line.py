"""The command line with real processes: what status shows, what is refused, and that Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.clusters import KVFERRY, RealCluster, Running, wait_until

pytestmark = pytest.mark.ray

QUIET = "router: {http_port: 0, grpc_port: 0}\n"


@pytest.fixture
def cluster(tmp_path: Path) -> RealCluster:
    return RealCluster("e2e-cli", tmp_path)


def test_status_json_has_the_keys_of_the_design(one_p_one_d: Running):
    cluster = one_p_one_d.cluster
    shown = cluster.kvferry("status", "--name", cluster.name, "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    status = json.loads(shown.stdout)
    assert status.keys() >= {"name", "ready", "endpoints", "routers", "workers", "totals"}
    assert (status["name"], status["ready"]) == (cluster.name, True)
    assert status["endpoints"] == {"http": one_p_one_d.http, "grpc": one_p_one_d.grpc}
    by_role = {worker["role"]: worker for worker in status["workers"]}
    blocks = ("blocks_free", "blocks_cached", "blocks_reserved", "blocks_in_use", "blocks_quarantined")
    for role in ("prefill", "decode"):
        worker = by_role[role]
        names = {"name", "role", "state", "pid", "node", "incarnation", "num_running", "num_waiting", "peers"}
        assert worker.keys() >= names | {"blocks_total", *blocks}
        assert worker["state"] == "ready"
        assert worker["blocks_total"] == sum(worker[name] for name in blocks) > 0
        assert worker["pid"] in cluster.processes()
    for name in ("blocks_total", *blocks, "num_running"):
        assert status["totals"][name] == sum(worker[name] for worker in status["workers"])


def test_status_shows_the_transport_that_prefill_uses_to_its_peer(one_p_one_d: Running):
    cluster = one_p_one_d.cluster
    assert cluster.kvferry("generate", "Hi", "--max-tokens", "2", "--name", cluster.name).returncode == 0

    def workers() -> dict[str, dict[str, object]]:
        shown = cluster.kvferry("status", "--name", cluster.name, "--json")
        return {worker["role"]: worker for worker in json.loads(shown.stdout)["workers"]}

    seen = wait_until(workers, lambda by_role: bool(by_role["prefill"]["peers"]), 5)
    decode = {"incarnation": seen["decode"]["incarnation"], "address": seen["decode"]["address"]}
    assert seen["prefill"]["peers"] == [decode | {"transport": "grpc", "checksum": True, "why": ""}]


def test_the_colocated_cluster_has_as_many_workers_and_each_does_both(colocated: Running, one_p_one_d: Running):
    workers, processes = colocated.status().workers, colocated.cluster.processes()
    assert [(worker.stats.role, worker.stats.pid in processes) for worker in workers] == [("colocated", True)] * 2
    blocks = [sum(worker.stats.blocks_total for worker in one.status().workers) for one in (colocated, one_p_one_d)]
    assert blocks[0] == blocks[1]
    answer = colocated.cluster.kvferry("generate", "Hi", "--max-tokens", "4", "--name", colocated.cluster.name)
    assert (answer.returncode, answer.stderr, bool(answer.stdout.strip())) == (0, "", True)
    assert [worker.stats.kv_bytes_received for worker in workers] == [0, 0]


def busy_port(key: str) -> tuple[socket.socket, str]:
    busy = socket.create_server(("127.0.0.1", 0))
    other = {"http_port": "grpc_port", "grpc_port": "http_port"}[key]
    return busy, f"router: {{{key}: {busy.getsockname()[1]}, {other}: 0}}\n"


REFUSED = {
    "unknown key": (QUIET + "max_num_seq: 4\n", "max_num_seq: unknown key; did you mean max_num_seqs?"),
    "wrong type": (QUIET + "block_size: big\n", "block_size: must be a whole number, not 'big'"),
    "no YAML": (QUIET + "model: [\n", "not valid YAML: "),
    "missing model": (QUIET + "model: /nowhere/m.gguf\n", "no such model: /nowhere/m.gguf does not exist"),
    "missing package": (
        QUIET + "model: package:llm_nowhere\n",
        "llm_nowhere is not installed: pip install llm-nowhere",
    ),
    "http_port": ("", "the port is in use"),
    "grpc_port": ("", "the port is in use"),
}


@pytest.mark.parametrize("detach", [False, True], ids=["foreground", "detached"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_start_is_refused_in_one_line_and_starts_nothing(cluster: RealCluster, case: str, detach: bool):
    text, says = REFUSED[case]
    busy = None
    if case.endswith("_port"):
        busy, text = busy_port(case)
        says = f"router.{case}: 127.0.0.1:{busy.getsockname()[1]}: {says}"
    try:
        require_refused(cluster, cluster.write_config(text), detach, says)
    finally:
        if busy:
            busy.close()


@pytest.mark.parametrize("detach", [False, True], ids=["foreground", "detached"])
def test_a_missing_config_is_refused_in_one_line(cluster: RealCluster, detach: bool):
    require_refused(cluster, cluster.home / "missing.yaml", detach, "missing.yaml: no such file")


def require_refused(cluster: RealCluster, config: Path, detach: bool, says: str) -> None:
    refused = cluster.kvferry("up", config, *(["--detach"] if detach else []))
    assert (refused.returncode, refused.stdout) == (2, ""), refused
    assert refused.stderr.startswith("kvferry: ")
    assert says in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert "Traceback" not in refused.stderr
    assert not cluster.processes()


# While Ray starts, Ctrl-C ends some of its processes and leaves others without their parents.
@pytest.mark.parametrize(
    ("said", "delay_s"), [("starting Ray", 0.9), pytest.param("loading", 0.3, marks=pytest.mark.slow)]
)
def test_ctrl_c_while_it_starts_leaves_nothing(cluster: RealCluster, said: str, delay_s: float):
    command = [*KVFERRY, "up", str(cluster.write_config(QUIET))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=cluster.env
    ) as up:
        assert up.stdout is not None
        assert up.stderr is not None
        assert any(said in line for line in iter(up.stdout.readline, ""))
        time.sleep(delay_s)
        # As a terminal does it: to the whole group.
        os.killpg(up.pid, signal.SIGINT)
        up.stdout.read()
        complaint = up.stderr.read()
        assert up.wait(60) == 1
    assert complaint.count("\n") <= 1
    assert "Traceback" not in complaint
    assert not wait_until(cluster.processes, lambda left: not left, 5)
