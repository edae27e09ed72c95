"""On which nodes of a Ray processes may be, as a config says it."""

from __future__ import annotations

import pytest

from cluster.config import parse_config
from cluster.placement import actor_options
from cluster.worker_configs import worker_configs
from workers.config import PlacementConfig
from workers.errors import ConfigError

PLACED = "address: auto\nprefill: {resources: {place: 1, GPU: 0.5}, label_selector: {zone: a}}\n"


def test_a_role_says_what_its_nodes_must_have():
    config = parse_config(PLACED, "c.yaml")
    assert actor_options(config.prefill, num_gpus=1) == {
        "num_cpus": 0.0,
        "num_gpus": 0.5,
        "resources": {"place": 1.0},
        "label_selector": {"zone": "a"},
    }
    # Nothing is asked for the others, and an engine is told nothing of it.
    assert actor_options(config.decode, num_gpus=1) == actor_options(config.router, 1) == {"num_cpus": 0, "num_gpus": 1}
    assert [worker.name for worker in worker_configs(config)] == ["prefill-0", "decode-0"]


def test_cpus_are_waited_for_only_by_who_asks():
    assert actor_options(PlacementConfig(resources={"CPU": 4}), 0) == {"num_cpus": 4, "num_gpus": 0}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("router: {resources: {door: 1}}", "router.resources chooses among the nodes of a running Ray: set address"),
        ("decode: {label_selector: {zone: a}}", "decode.label_selector chooses among the nodes of a running Ray"),
        ("address: auto\ndecode: {resources: {place: 1.5}}", "decode.resources: place is 1.5: must be a whole number"),
        ("address: auto\ndecode: {resources: {place: 0}}", "decode.resources: place is 0: must be"),
        ("address: auto\ndecode: {resources: {memory: 1}}", "decode.resources: memory is not asked for here"),
        (
            "address: auto\ndecode: {resource: {place: 1}}",
            "decode.resource: unknown key; did you mean decode.resources?",
        ),
    ],
)
def test_places_that_cannot_be_are_refused(text, complaint):
    with pytest.raises(ConfigError, match=rf"c.yaml:\d: {complaint}".replace("?", r"\?")):
        parse_config(text, "c.yaml")
