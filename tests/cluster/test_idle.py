"""What a preStop hook waits for, on a clock that the test turns; and the command, against a router."""

from __future__ import annotations

import pytest

from cluster.cli import run
from cluster.client import Client
from cluster.idle import wait_idle
from protos.router_pb2 import GetStatusResponse, RouterStatus


class Stage:
    """A router whose requests are over at given times."""

    def __init__(self, *ends_s: float) -> None:
        self.now_s = 0.0
        self.ends_s = ends_s

    def status(self) -> GetStatusResponse:
        left = sum(end_s > self.now_s for end_s in self.ends_s)
        # One that runs, and the others in the queue.
        return GetStatusResponse(routers=[RouterStatus(num_running=min(left, 1), num_queued=max(left - 1, 0))])

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s

    def wait(self, settle_s: float, timeout_s: float) -> int:
        return wait_idle(self.status, settle_s, timeout_s, lambda: self.now_s, self.sleep)


@pytest.mark.parametrize(
    ("ends_s", "waited_s", "left"),
    [((), 10, 0), ((3,), 10, 0), ((30,), 30, 0), ((12, 30), 30, 0), ((500,), 120, 1), ((500, 600, 20), 120, 2)],
)
def test_it_waits_for_the_last_request_and_never_longer_than_it_may(ends_s, waited_s, left):
    stage = Stage(*ends_s)
    assert stage.wait(settle_s=10, timeout_s=120) == left
    assert waited_s <= stage.now_s < waited_s + 1


def test_the_command_says_how_many_are_left(router, capsys):
    with Client(router.target) as client:
        (told,) = client.status().routers
    assert run(["wait-idle", "--target", router.target, "--timeout-s", "0"]) == 1
    assert capsys.readouterr().out == f"{told.num_running + told.num_queued} requests are left\n"
