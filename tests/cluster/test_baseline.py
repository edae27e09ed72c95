"""E11: `kvferry up colocated` is the fair thing to compare `kvferry up` with: the same resources, no hand-off."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml

from cluster.cli import run
from cluster.config import ClusterConfig, load_config
from cluster.worker_configs import worker_configs
from workers.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig


def resources(config: ClusterConfig, num_cores: int) -> Counter[str]:
    """What each worker has, whatever its name and role."""
    parts = set().union(*(part.model_fields for part in (ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig)))
    return Counter(worker.model_dump_json(include=parts) for worker in worker_configs(config, range(num_cores)))


@pytest.mark.parametrize("num_cores", [1, 2, 3, 8])
def test_the_baseline_has_the_resources_of_the_default(num_cores: int) -> None:
    default, baseline = load_config(None), load_config("colocated")
    assert resources(baseline, num_cores) == resources(default, num_cores)
    assert baseline.router == default.router
    assert {*baseline.worker_roles().values()} == {"colocated"}
    assert {*default.worker_roles().values()} == {"prefill", "decode"}


def test_it_is_found_by_its_name(home, capsys) -> None:
    assert run(["config", "show", "colocated"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["colocated"]["replicas"] == 2
