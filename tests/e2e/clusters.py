"""Real clusters: `kvferry up` with real processes, each in a home of its own, by whose name all of it can be found."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from grpc import Channel, insecure_channel

from cluster.client import Client
from cluster.guard import start_time
from protos import router_pb2, worker_pb2, worker_pb2_grpc

T = TypeVar("T")

KVFERRY = [sys.executable, "-m", "cluster.cli"]
_UP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class RealCluster:
    """One cluster of a user whose home is `home`."""

    name: str
    home: Path
    # Of its commands, beside what the tests themselves have.
    more_environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "HOME": str(self.home), **self.more_environment}

    def write_config(self, text: str) -> Path:
        path = self.home / f"{self.name}.yaml"
        path.write_text(f"name: {self.name}\n{text}", encoding="utf-8")
        return path

    def kvferry(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [*KVFERRY, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=_UP_TIMEOUT_S, env=self.env)

    def processes(self) -> dict[int, str]:
        """Whatever runs with this home, each with its command line."""
        mark = f"HOME={self.home}".encode()
        found = {}
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if mark in environment and start_time(pid):
                found[pid] = command
        return found


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster that is up."""

    cluster: RealCluster
    http: str
    grpc: str
    channels: tuple[Channel, ...]

    def status(self) -> router_pb2.GetStatusResponse:
        with Client(self.grpc) as client:
            return client.status()

    def stats(self) -> dict[str, worker_pb2.WorkerStats]:
        """By role, of one worker each: what the workers say now; a router's news may be a second old."""
        request = worker_pb2.GetStatsRequest()
        stubs = [worker_pb2_grpc.WorkerServiceStub(channel) for channel in self.channels]
        answers = [stub.GetStats(request, timeout=30).stats for stub in stubs]
        return {stats.role: stats for stats in answers}

    def when_free(self, within_s: float) -> dict[str, worker_pb2.WorkerStats]:
        """The workers' stats as soon as they hold nothing; AssertionError when that takes longer."""
        return wait_until(self.stats, lambda stats: all(is_free(worker) for worker in stats.values()), within_s)


def is_free(stats: worker_pb2.WorkerStats) -> bool:
    taken = stats.blocks_in_use + stats.blocks_reserved + stats.blocks_quarantined
    running = stats.num_running + stats.num_waiting + stats.num_waiting_for_kv
    return not taken and not running and stats.blocks_free + stats.blocks_cached == stats.blocks_total


def wait_until(look: Callable[[], T], holds: Callable[[T], bool], within_s: float) -> T:
    deadline_s = time.monotonic() + within_s
    while not holds(seen := look()):
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {seen}"
        time.sleep(0.02)
    return seen


@contextmanager
def up(cluster: RealCluster, config: str, *options: str) -> Iterator[Running]:
    """`kvferry up --detach` and `kvferry down`, after which nothing may be left."""
    path = cluster.write_config(config)
    started = cluster.kvferry("up", path, "--detach", *options)
    assert (started.returncode, started.stderr) == (0, ""), started
    try:
        with connected(cluster, started.stdout) as running:
            yield running
    finally:
        stopped = cluster.kvferry("down", "--name", cluster.name)
    assert (stopped.returncode, stopped.stdout) == (0, f"{cluster.name} is down\n"), stopped
    assert not cluster.processes()


@contextmanager
def connected(cluster: RealCluster, ready_line: str) -> Iterator[Running]:
    """From the line that `up` prints when it is ready."""
    http, target = (part.split()[0] for part in ready_line.split("ready: HTTP ")[1].split(", gRPC "))
    with Client(target) as client:
        workers = client.status().workers
    channels = tuple(insecure_channel(worker.address) for worker in workers)
    try:
        yield Running(cluster, http, target, channels)
    finally:
        for channel in channels:
            channel.close()
