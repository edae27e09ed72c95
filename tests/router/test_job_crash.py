"""Routers that are killed in the middle of a job: real processes on a real database, without a model."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from cluster.client import Client, JobResult
from router.text import seed_of
from tests.router.jobs import token_of
from tests.router.scripted import smollm
from workers.errors import UnavailableError

pytestmark = pytest.mark.slow

PROMPTS = [f"prompt {at}" for at in range(500)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def router_process(url: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-m", "tests.router.job_process", url, str(port)]) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(client: Client) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            client.status()
            return
        except UnavailableError:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def require_one_answer_each(job_id: str, results: list[JobResult]) -> None:
    """The same as one router without a crash would give."""
    assert Counter(result.index for result in results) == dict.fromkeys(range(len(PROMPTS)), 1)
    for result in results:
        assert result.completion is not None, result.error
        token = token_of(smollm().encode(PROMPTS[result.index]), seed_of(f"{job_id}.{result.index}"))
        assert result.completion.token_ids == (token,)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").fresh_database())
    return f"sqlite:///{tmp_path}/jobs.sqlite"


def test_a_job_outlives_its_router_being_killed_twice(url):
    port = free_port()
    with ExitStack() as stack, Client(f"127.0.0.1:{port}") as client:
        process = stack.enter_context(router_process(url, port))
        wait_for(client)
        job = client.submit(PROMPTS)
        results = []
        for result in job.results():
            results.append(result)
            if len(results) in (100, 300):
                process.kill()
                process.wait()
                process = stack.enter_context(router_process(url, port))
        require_one_answer_each(job.id, results)
        assert [result.index for result in job.result(timeout=30)] == list(range(500))
        assert (job.status, job.info.num_answered, job.info.num_failed) == ("completed", 500, 0)


def test_two_routers_share_a_job_and_the_one_that_is_left_ends_it(url):
    ports = [free_port(), free_port()]
    with ExitStack() as stack, Client(",".join(f"127.0.0.1:{port}" for port in ports)) as client:
        processes = [stack.enter_context(router_process(url, port)) for port in ports]
        alone = [stack.enter_context(Client(f"127.0.0.1:{port}")) for port in ports]
        for one in alone:
            wait_for(one)
        job = client.submit(PROMPTS)
        results: list[JobResult] = []
        worked = set()
        for result in job.results():
            results.append(result)
            if len(results) < 200:
                worked |= {one.target for one in alone if one.status().routers[0].num_running}
            if len(results) == 200:
                processes[0].kill()
        assert len(worked) == 2
        require_one_answer_each(job.id, results)
