"""What the cluster's process makes of a beat: whatever Ray says is the trouble of that one actor, never of the rest."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import ray.exceptions

from cluster.config import ClusterConfig
from cluster.controller import Health
from cluster.directory import Directory
from cluster.launch import Cluster
from router.roles import Member
from workers.config import WorkerConfig


class Actor:
    """Its beat is itself."""

    @property
    def beat(self) -> Actor:
        return self

    def remote(self, *_: object) -> Actor:
        return self


@pytest.mark.parametrize(
    ("error", "health"),
    [
        (ray.exceptions.GetTimeoutError(), Health.SILENT),
        (ray.exceptions.ActorDiedError(), Health.DEAD),
        (ray.exceptions.ActorUnavailableError("gone", None), Health.SILENT),
        (ray.exceptions.WorkerCrashedError(), Health.SILENT),
        (ray.exceptions.RaySystemError("the object store is full"), Health.SILENT),
        (ray.exceptions.ObjectLostError("0" * 56, None, ""), Health.SILENT),
    ],
)
def test_a_beat_that_fails_is_the_trouble_of_one(error, health, monkeypatch, tmp_path):
    well, ill = Actor(), Actor()

    def get(call: object, timeout: float) -> int:
        if call is ill:
            raise error
        return 1

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []))
    cluster = Cluster(ClusterConfig(), tmp_path)
    actors: dict[str, Any] = {"well": well, "ill": ill}
    cluster._actors = actors
    for _ in range(2):
        assert cluster.health() == {"well": Health.ANSWERS, "ill": health}


def test_whoever_starts_hears_meanwhile_that_it_is_somebodys(monkeypatch, tmp_path):
    """Another `kvferry up` that finds it then would take it over otherwise."""
    beats: list[object] = []

    class Starting:
        @property
        def beat(self) -> Starting:
            return self

        def remote(self, controller: int) -> str:
            beats.append(controller)
            return f"beat {len(beats)}"

    def wait(calls: list[object], timeout: float, **_: object) -> tuple[list[object], list[object]]:
        done = [call for call in calls if call != "start" or len(beats) >= 3]
        return done, [call for call in calls if call not in done]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda call, **_: call)
    monkeypatch.setattr("cluster.launch.BEAT_S", 0.0)
    cluster = Cluster(ClusterConfig(), tmp_path)
    cluster._actors = {"prefill-0": Starting()}
    assert cluster._all({"prefill-0": "start"}) == {"prefill-0": "start"}
    assert beats == [1, 1, 1]


class Router:
    """Is told; whether that arrives says the test."""

    def __init__(self) -> None:
        self.told: list[object] = []

    @property
    def set_workers(self) -> Router:
        return self

    def remote(self, members: object) -> int:
        self.told.append(members)
        return len(self.told)


def test_a_router_that_was_not_reached_is_told_again(monkeypatch):
    def get(call: int) -> int:
        if call == 1:
            raise ray.exceptions.ActorUnavailableError("gone", None)
        return call

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []))
    directory, router = Directory(), Router()
    directory.addresses["decode-0"], directory.configs["decode-0"] = "d:1", WorkerConfig(role="decode")
    directory.mark({"decode-0"}, ())
    heard = [directory.tell({"router-0": router}) for _ in range(3)]
    assert heard == [False, False, True]
    assert router.told == [{"d:1": Member("decode", draining=True)}] * 2
