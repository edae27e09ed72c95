"""What a process asks of the node on which Ray puts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.config import PlacementConfig


def misplaced(kinds: Mapping[str, PlacementConfig]) -> str:
    """Whoever asks for nodes that a private Ray has not, in one line; empty: nobody."""
    for name, placement in kinds.items():
        for key in PlacementConfig.model_fields:
            if getattr(placement, key):
                return f"{name}.{key} chooses among the nodes of a running Ray: set address to join one, or take it out"
    return ""


def actor_options(placement: PlacementConfig, num_gpus: float) -> dict[str, Any]:
    """Of a Ray actor, which waits for no CPUs unless it asks: cpu_affinity and num_threads share them out.

    `num_gpus`: what it gets where it names no GPU.
    """
    resources = dict(placement.resources)
    options: dict[str, Any] = {"num_cpus": resources.pop("CPU", 0.0), "num_gpus": resources.pop("GPU", num_gpus)}
    if resources:
        options["resources"] = resources
    if placement.label_selector:
        options["label_selector"] = dict(placement.label_selector)
    return options
