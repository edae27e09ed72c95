"""What the cluster's process makes of a beat: whatever Ray says is the trouble of that one actor, never of the rest."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import ray.exceptions

from cluster.config import ClusterConfig
from cluster.controller import Health
from cluster.launch import Cluster


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
